/** Lists of jobs as they come to be: long names, long reasons, many of them; and Try, with the newest adapter. */

import assert from "node:assert/strict";
import path from "node:path";
import { scenario, view } from "./page.js";

const { NAME, ADAPTER, OUT } = process.env;
const LINE_PX = 26;

await scenario(async (page) => {
  await view(page, "jobs");
  const ended = page.getByRole("table", { name: "Ended, the newest first" });
  for (const width of [1280, 1100, 840]) {
    await page.setViewportSize({ width, height: 900 });
    const found = await ended.evaluate((table) => ({
      wide: table.getBoundingClientRect().right <= document.documentElement.clientWidth,
      names: [...table.querySelectorAll("tbody th")].map((cell) => cell.checkVisibility() && cell.clientWidth).filter(Boolean),
      // Text of another direction has a rectangle of its own on the same line.
      lines: Math.max(
        ...[...table.querySelectorAll("tbody th a")].map(
          (link) => new Set([...link.getClientRects()].map((one) => Math.round(one.bottom / 8))).size,
        ),
      ),
      rows: Math.max(...[...table.querySelectorAll("tbody tr")].map((row) => row.clientHeight)),
    }));
    if (OUT) await page.screenshot({ path: path.join(OUT, `lists-${width}.png`), fullPage: true });
    assert.ok(found.wide, `${width}: the table is wider than the page`);
    assert.ok(Math.min(...found.names) >= 144, `${width}: a name has ${Math.min(...found.names)} px`);
    assert.ok(found.lines <= 4, `${width}: a name takes ${found.lines} lines`);
    assert.ok(found.rows <= 9 * LINE_PX, `${width}: a row is ${found.rows} px high`);
  }
  assert.ok((await ended.innerText()).includes(NAME));

  // A phone: what a list takes at first is a few screens, not dozens.
  await page.setViewportSize({ width: 390, height: 800 });
  if (OUT) await page.screenshot({ path: path.join(OUT, "lists-390.png"), fullPage: true });
  const height = await ended.evaluate((table) => table.parentElement.clientHeight);
  assert.ok(height <= 1500, `the list is ${height} px high`);
  await page.setViewportSize({ width: 1100, height: 800 });

  await view(page, "chat");
  assert.equal(await page.getByLabel("Adapter", { exact: true }).inputValue(), ADAPTER);
  assert.equal(await page.getByLabel("How", { exact: true }).inputValue(), "chat");
  await page.getByRole("button", { name: "Ask both" }).waitFor();

  // One word for one thing.
  await view(page, "adapters");
  assert.equal(await page.getByRole("button", { name: "Activate" }).count(), 1);
  assert.equal(await page.getByRole("button", { name: /^use\b/i }).count(), 0);
  return { height };
});
