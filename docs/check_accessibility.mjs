// Opens pages of a built site in Chromium, from the file system, at the width of a desktop and of a phone,
// light and dark. Fails on serious findings of axe, on pages wider than the window, on errors of scripts,
// on requests to a network, and on a search without results.
//
//     node docs/check_accessibility.mjs build/docs/0.1.0
//
// `make docs CHECK=yes` installs what it imports into build/docs-check.

import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(resolve("build/docs-check/package.json"));
const { chromium } = require("playwright-core");
const axe = require.resolve("axe-core/axe.min.js");

const PAGES = [
  "index.html",
  "guides/keras.html",
  "performance.html",
  "reference/index.html",
  "reference/cli.html",
  "search.html?q=checkpoint",
];
const WIDTHS = [1280, 390];
const SCHEMES = ["light", "dark"];
const QUIET = ["quic", "background-networking", "component-update", "sync", "gpu"];

const site = resolve(process.argv[2] ?? "");
if (!existsSync(`${site}/index.html`)) {
  console.error(`${site} has no index.html: run make docs, and give build/docs/<version>.`);
  process.exit(2);
}
const executablePath = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);
if (!executablePath) {
  console.log("Skipped: the check of the pages. It needs chromium or google-chrome in /usr/bin.");
  process.exit(0);
}

async function check(browser, page, width, colorScheme) {
  const found = [];
  const context = await browser.newContext({ viewport: { width, height: 844 }, colorScheme });
  const tab = await context.newPage();
  tab.on("pageerror", (error) => found.push(`script: ${error.message}`));
  tab.on("request", (request) => {
    if (!/^(file|data|blob):/.test(request.url())) found.push(`request: ${request.url()}`);
  });
  const [path, query] = page.split("?");
  await tab.goto(`${pathToFileURL(`${site}/${path}`)}${query ? `?${query}` : ""}`);
  if (query) await tab.waitForSelector("#search-results li p", { timeout: 10_000 });
  await tab.waitForTimeout(500);
  const excess = await tab.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  if (excess > 0) found.push(`layout: ${excess} pixels wider than the window`);
  await tab.addScriptTag({ path: axe });
  const { violations } = await tab.evaluate(() => window.axe.run());
  for (const { id, impact, help, nodes } of violations) {
    if (["serious", "critical"].includes(impact)) {
      found.push(`axe: ${id}: ${help}, in ${nodes.length} places, first ${nodes[0].target.join(" ")}`);
    }
  }
  await context.close();
  return found.map((one) => `${page} ${width} ${colorScheme}: ${one}`);
}

const browser = await chromium.launch({
  executablePath,
  args: ["--no-sandbox", "--no-first-run", ...QUIET.map((name) => `--disable-${name}`)],
});
const found = [];
for (const page of PAGES)
  for (const width of WIDTHS)
    for (const scheme of SCHEMES) found.push(...(await check(browser, page, width, scheme)));
await browser.close();
console.log(found.length ? found.join("\n") : `${PAGES.length} pages, no findings`);
process.exit(found.length ? 1 : 0);
