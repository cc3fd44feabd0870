/** Debian's Chromium over a daemon's page, watched for what must not happen: errors, CSP violations, outside requests. */

import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const STEP_MS = 60_000;
export const WORKER_MS = 120_000;
export const url = process.env.ONDEVICE_URL;

/** Run a scenario in a fresh window; what it gives is printed as JSON for the caller. */
export async function scenario(work, options = {}) {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM,
    args: ["--no-sandbox", "--disable-dev-shm-usage"],
  });
  const watched = { problems: [] };
  try {
    const page = await open(browser, watched, options);
    const answer = await work(page, browser, watched).catch(async (error) => {
      const said = await page.locator("body").innerText().catch(() => "nothing");
      throw new Error(`${error.stack}\nThe page says:\n${said}\nNoted: ${watched.problems.join("\n")}`);
    });
    assert.deepEqual(watched.problems, []);
    console.log(JSON.stringify(answer ?? {}));
  } finally {
    await browser.close();
  }
}

/** A page in a context of its own; everything that it should not do is noted in `watched.problems`. */
export async function open(browser, watched, options = {}) {
  const context = await browser.newContext({
    viewport: { width: 1100, height: 800 },
    acceptDownloads: true,
    ...options,
  });
  context.setDefaultTimeout(STEP_MS);
  const page = await context.newPage();
  page.on("pageerror", (error) => watched.problems.push(`error: ${error.stack}`));
  page.on("console", (message) => {
    const refused = message.text().startsWith("Failed to load resource"); // the browser's own line for a status from 400 on
    if (message.type() === "error" && !refused) watched.problems.push(`console: ${message.text()}`);
  });
  page.on("request", (request) => {
    const { origin, protocol } = new URL(request.url());
    if (origin !== new URL(url).origin && !["data:", "blob:"].includes(protocol))
      watched.problems.push(`outside request: ${request.url()}`);
  });
  await page.exposeFunction("noteViolation", (text) => watched.problems.push(`CSP: ${text}`));
  await page.addInitScript(() => {
    document.addEventListener("securitypolicyviolation", (event) =>
      window.noteViolation(`${event.violatedDirective} ${event.blockedURI}`),
    );
    window.announced = [];
    document.addEventListener("DOMContentLoaded", () => {
      const note = (records) => records.forEach(({ addedNodes: [text] }) => text && window.announced.push(text.data));
      new MutationObserver(note).observe(document.getElementById("said"), { childList: true });
    });
  });
  return page;
}

/** Go to a view and wait until it is there. */
export async function view(page, hash) {
  await page.goto(`${url}/#/${hash}`);
  await page.locator("main:not([aria-busy]) h1").waitFor();
}

/** All that a screen reader was told since the page was loaded: the next word may have replaced one that is waited for. */
export const announced = (page) => page.evaluate(() => window.announced.join("\n"));

/** What a chart says of itself. */
export const chartWords = (page, title) =>
  page.locator("figure", { hasText: title }).locator("[role=img]").first().getAttribute("aria-label");

/** The last step that the loss curve shows; 0 before the first. */
export async function lastStep(page) {
  const [, last] = /steps 1 to ([\d,]+)/.exec((await chartWords(page, "Loss")) ?? "") ?? [];
  return last ? Number(last.replaceAll(",", "")) : 0;
}

/** The loss of the last evaluation that the chart of the loss is told of; NaN where there is none. */
export async function lastEvaluation(page) {
  const [, last] = /evaluation from \S+ to ([\d.]+)/.exec((await chartWords(page, "Loss")) ?? "") ?? [];
  return Number(last ?? NaN);
}

/** Choose a training method, which may be folded away. */
export async function chooseMethod(page, name) {
  const methods = page.getByRole("group", { name: "Method" });
  const others = methods.locator("details");
  if ((await others.getAttribute("open")) === null) await others.locator("summary").click();
  await methods.locator(`input[value="${name}"]`).check();
}

/** Wait until `check` gives something true. */
export async function until(what, check, limitMs = WORKER_MS, everyMs = 100) {
  const end = Date.now() + limitMs;
  while (Date.now() < end) {
    const found = await check();
    if (found) return found;
    await new Promise((resolve) => setTimeout(resolve, everyMs));
  }
  throw new Error(`waited ${limitMs / 1000} s in vain for ${what}`);
}
