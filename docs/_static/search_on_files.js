// On file://, a browser reads no other page: results show first paragraphs from a script instead.
if (window.location.protocol === "file:") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
  const results = document.getElementById("search-results");
  const describe = (item) => {
    const link = item.querySelector("a");
    if (!link || item.querySelector("p, span")) return;
    const page = decodeURI(link.getAttribute("href").split(/[?#]/)[0]).replace(/\.html$/, "");
    const text = window.pageDescriptions?.[page];
    if (text) {
      const paragraph = document.createElement("p");
      paragraph.className = "context";
      paragraph.textContent = text;
      item.append(paragraph);
    }
  };
  if (results) {
    const script = document.createElement("script");
    script.src = `${document.documentElement.dataset.content_root}_static/descriptions.js`;
    script.onload = () => results.querySelectorAll("li").forEach(describe);
    document.head.append(script);
    new MutationObserver((changes) => {
      for (const { addedNodes } of changes)
        for (const node of addedNodes) if (node.nodeName === "LI") describe(node);
    }).observe(results, { childList: true, subtree: true });
  }
}
