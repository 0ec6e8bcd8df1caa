// Fills the version menus: the header has one, and on narrow screens the side bar another.
for (const menu of document.querySelectorAll("select.version-menu:not([data-filled])")) {
  const { root, version } = menu.dataset;
  const versions = window.stratagemVersions ?? [];
  if (versions.length) {
    menu.replaceChildren(
      ...[...new Set([...versions, version])].map((one, place) => {
        const label = place === 0 && versions.length > 1 ? `${one} (newest)` : one;
        return new Option(label, one, false, one === version);
      }),
    );
  }
  menu.dataset.filled = "";
  menu.addEventListener("change", () => {
    window.location.href = `${root}/${menu.value}/index.html`;
  });
}
