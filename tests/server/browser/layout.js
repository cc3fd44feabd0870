/** Every view at 360 px, light and dark: nothing sideways, readable contrast, names for controls; the CSP holds. */

import assert from "node:assert/strict";
import { lastStep, open, scenario, until, url, view } from "./page.js";

const { JOB } = process.env;
const VIEWS = ["jobs", `jobs/${JOB}`, "new", "data", "adapters", "chat", `compare?jobs=${JOB}`];
const LOWEST_CONTRAST = 4.5; // WCAG 2.2, AA

await scenario(async (page, browser, watched) => {
  await view(page, "jobs");
  const ran = await page.evaluate(() => {
    document.body.append(Object.assign(document.createElement("script"), { textContent: "window.ran = true" }));
    return window.ran === true;
  });
  assert.equal(ran, false, "inline code runs");
  await until("the violation", () => watched.problems.some((problem) => problem.startsWith("CSP:")));
  watched.problems.length = 0;

  const backs = {};
  for (const colorScheme of ["light", "dark"]) {
    const narrow = await open(browser, watched, { viewport: { width: 360, height: 740 }, colorScheme });
    for (const name of VIEWS) {
      await view(narrow, name);
      if (name.startsWith("jobs/")) await until("the curve", () => lastStep(narrow));
      await narrow.evaluate(() => document.querySelectorAll("details").forEach((details) => (details.open = true)));
      const found = await narrow.evaluate(inspect, LOWEST_CONTRAST);
      assert.deepEqual(found.problems, [], `${name}, ${colorScheme}`);
      backs[colorScheme] = found.back;
      if (name.startsWith("jobs/"))
        backs[`${colorScheme} curve`] = await narrow
          .locator("canvas")
          .first()
          .evaluate((canvas) => canvas.toDataURL());
    }
    if (colorScheme === "light") {
      // The colours follow the system while the page is open; a chart draws itself anew.
      await view(narrow, `jobs/${JOB}`);
      await until("the curve", () => lastStep(narrow));
      const before = await narrow
        .locator("canvas")
        .first()
        .evaluate((canvas) => canvas.toDataURL());
      await narrow.emulateMedia({ colorScheme: "dark" });
      await until(
        "a dark curve",
        async () =>
          (await narrow
            .locator("canvas")
            .first()
            .evaluate((canvas) => canvas.toDataURL())) !== before,
      );
    }
    await narrow.context().close();
  }
  assert.notEqual(backs.light, backs.dark);
  assert.notEqual(backs["light curve"], backs["dark curve"]);

  await refusals(page);
  return { views: VIEWS.length };
});

/** What the API refuses is shown with what was expected, received, and what to try. */
async function refusals(page) {
  await view(page, "jobs/job-that-never-was");
  const said = await page.getByRole("alert").innerText();
  assert.match(said, /no such job/);
  await view(page, "new");
  await page.getByLabel("Model", { exact: true }).selectOption({ label: "another one, by hub id" });
  await page.getByLabel("Hub id", { exact: true }).fill("no such model");
  for (let step = 0; step < 3; step += 1) await page.getByRole("button", { name: "Next" }).click();
  const refused = page.getByRole("alert");
  await refused.waitFor();
  const words = await refused.innerText();
  for (const part of ["no such model", "Expected", "hub id such as", "Received", "Try", "upload it as a zip"])
    assert.ok(words.includes(part), words);
  assert.ok(await page.getByRole("button", { name: "Start the job" }).isDisabled());
  assert.equal(new URL(page.url()).origin, new URL(url).origin);
}

/** Runs in the page: what is wrong with what is shown now. */
function inspect(lowest) {
  const problems = [];
  const shown = (element) => element.checkVisibility() && !element.closest(".unseen, .skip");
  const describe = (element) =>
    `${element.tagName.toLowerCase()}.${element.className} “${element.textContent.trim().slice(0, 30)}”`;
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width)
    problems.push(`scrolls sideways: ${document.documentElement.scrollWidth} px`);

  const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", {
    willReadFrequently: true,
  });
  const rgba = (text) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = text;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = (text) => {
    const [r, g, b] = rgba(text).map((value) =>
      value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4,
    );
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const backOf = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const back = getComputedStyle(one).backgroundColor;
      if (rgba(back)[3] === 255) return back;
    }
    return "white";
  };
  for (const element of document.querySelectorAll("body *")) {
    if (!shown(element)) continue;
    if (element.getBoundingClientRect().right > width + 1 && !element.closest(".u-wrap"))
      problems.push(`beyond the edge: ${describe(element)}`);
    const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!own || element.closest(":disabled, [aria-disabled], option, svg, canvas")) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(backOf(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < lowest) problems.push(`contrast ${contrast.toFixed(2)}: ${describe(element)}`);
  }

  for (const control of document.querySelectorAll("input, select, textarea, progress")) {
    if (shown(control) && !control.labels?.length && !control.getAttribute("aria-label"))
      problems.push(`no label: ${control.outerHTML}`);
  }
  for (const control of document.querySelectorAll("button, a, summary"))
    if (!control.textContent.trim()) problems.push(`no name: ${control.outerHTML}`);
  for (const picture of document.querySelectorAll("[role=img]"))
    if (!picture.getAttribute("aria-label")) problems.push("a picture without words");
  for (const table of document.querySelectorAll("table.cards"))
    if (!table.caption?.textContent) problems.push("a table without a caption");
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of new Set(ids))
    if (ids.filter((one) => one === id).length > 1) problems.push(`two elements have the id ${id}`);
  if (document.querySelectorAll("h1").length !== 1) problems.push("not one main heading");
  if (!document.title.includes(document.querySelector("h1").textContent)) problems.push(`title ${document.title}`);
  return { problems, back: getComputedStyle(document.body).backgroundColor };
}
