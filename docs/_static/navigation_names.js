// Names the arrows that open a part of the navigation, for screen readers.
for (const summary of document.querySelectorAll("nav details > summary")) {
  const page = summary.closest("li")?.querySelector("a")?.textContent.trim();
  if (page && !summary.textContent.trim()) summary.setAttribute("aria-label", `Pages of ${page}`);
}
