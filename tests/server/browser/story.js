/** A whole run in the browser: bad rows, good rows, preview, plan, live curve, pause, resume, a killed worker, download. */

import assert from "node:assert/strict";
import { readdirSync, readFileSync, readlinkSync } from "node:fs";
import path from "node:path";
import { announced, chooseMethod, lastEvaluation, lastStep, scenario, until, url, view, WORKER_MS } from "./page.js";

const NAME = "Größe 漢字 שלום 🙂";
const STEPS = 800;
const { ROWS, BAD_ROWS, OUT } = process.env;

await scenario(async (page) => {
  // One that runs keeps the job that the page starts in the queue until the page is ready to watch it.
  const before = await blocker(page);
  await view(page, "jobs");
  await page.getByRole("link", { name: "New job" }).first().click();
  await page.getByLabel("Model", { exact: true }).selectOption("tiny:llama");
  await page.getByLabel("Job name", { exact: true }).fill(NAME);
  await page.getByRole("button", { name: "Next" }).click();

  const upload = page.locator("details", { hasText: "Upload rows" });
  if ((await upload.getAttribute("open")) === null) await upload.locator("summary").first().click();
  await page.getByLabel("File with rows").setInputFiles(BAD_ROWS);
  await page.getByRole("button", { name: "Upload and check" }).click();
  const problem = page.getByRole("alert");
  await problem.waitFor({ timeout: WORKER_MS });
  const said = await problem.innerText();
  for (const part of ["Line 3", "label", "Expected", "only usable rows", "Received", "Try", "Skip unusable rows"])
    assert.ok(said.includes(part), `${part} in ${said}`);
  await page.getByLabel("File with rows").setInputFiles(ROWS);
  await page.getByRole("button", { name: "Upload and check" }).click();
  await page.getByText(/\d+ rows: /).waitFor({ timeout: WORKER_MS });
  assert.equal(await problem.count(), 0);
  assert.match(
    await page.getByLabel("Train on", { exact: true }).locator("option:checked").innerText(),
    /rows\.jsonl, \d+ rows/,
  );
  await page.getByLabel("Evaluate on", { exact: true }).selectOption({ index: 1 });
  await page.getByLabel("Max length tokens", { exact: true }).fill("32");
  await page.getByRole("button", { name: "Preview the rows" }).click();
  await page.locator(".example").first().waitFor({ timeout: WORKER_MS });
  const [masked, trained] = [
    await page.locator(".example .masked").first().innerText(),
    await page.locator(".example mark").first().innerText(),
  ];
  assert.match(masked, /漢字 שלום/);
  assert.match(trained, /ja|nein/);
  await page.getByRole("button", { name: "Next" }).click();

  await chooseMethod(page, "prge");
  await page.getByLabel("Learning rate", { exact: true }).fill("0.1");
  await page.getByLabel("Rank", { exact: true }).fill("2");
  await page.getByLabel("Queries", { exact: true }).fill("2");
  await page.getByLabel("Steps", { exact: true }).fill(String(STEPS));
  await page.getByLabel("Batch size", { exact: true }).fill("2");
  await page.getByLabel("Eval every", { exact: true }).fill("50");
  await page.getByLabel("Checkpoint every", { exact: true }).fill("20");
  await page.getByRole("button", { name: "Next" }).click();

  await page.getByText("Fits: ").waitFor({ timeout: WORKER_MS });
  const plan = await page.getByRole("table", { name: "Memory of the run by part" }).innerText();
  for (const part of ["weights", "adapter", "Total", "Available"]) assert.ok(plan.includes(part), plan);
  const start = page.getByRole("button", { name: "Start the job" });
  await page.getByText("Priority, nightly window, limits").click();
  await page.getByLabel("Memory limit, GiB", { exact: true }).fill("0.1");
  await page.keyboard.press("Tab");
  await page.locator(".verdict.bad").waitFor({ timeout: WORKER_MS });
  assert.ok(await start.isDisabled());
  await page.getByLabel("Start even if").check();
  assert.ok(await start.isEnabled());
  await page.getByLabel("Memory limit, GiB", { exact: true }).fill("");
  await page.keyboard.press("Tab");
  await page.getByText("Fits: ").waitFor({ timeout: WORKER_MS });
  await start.click();
  await page.waitForURL(/#\/jobs\/.+/);
  const job = decodeURIComponent(page.url().split("/").pop());
  await page.getByRole("heading", { name: NAME }).waitFor();

  // The curve moves: the figures behind it, and the pixels. The run stands where it is looked at, so that it cannot end.
  await page.request.post(`${url}/v1/jobs/${before}/cancel`, { data: {} });
  await runsTo(page, job, 5);
  await until("the first steps", () => lastStep(page));
  const [first, picture] = [await lastStep(page), await drawn(page)];
  signal(job, "SIGCONT");
  await runsTo(page, job, first + 20);
  await until("more steps", async () => (await lastStep(page)) > first);
  await until("another picture", async () => (await drawn(page)) !== picture); // drawn in the browser's own time

  await page.getByRole("button", { name: "Pause" }).click();
  await until("it is asked to stop", async () => (await at(page, job)).state === "pausing");
  signal(job, "SIGCONT");
  await state(page, "paused");
  const paused = await lastStep(page);
  assert.ok(paused < STEPS, "the job ended before it could be paused");
  await page.getByRole("button", { name: "Resume" }).click();
  await runsTo(page, job, paused + 20);
  await until("steps after the pause", async () => (await lastStep(page)) > paused);

  const killed = await lastStep(page);
  assert.ok(killed < STEPS, "the job ended before it could be killed");
  const pid = workerOf(job);
  process.kill(pid, "SIGKILL");
  await until("why it ended", async () => (await announced(page)).includes("the worker ended with SIGKILL"));
  await until("another worker", () => [0, pid].includes(workerOf(job)) === false);
  await until("steps of the other worker", async () => (await lastStep(page)) > killed);
  await state(page, "done");
  await until("the last step", async () => (await lastStep(page)) === STEPS);
  const { evaluation } = (await at(page, job)).progress;
  assert.equal(evaluation.step, STEPS);
  await until("its evaluation", async () => Math.abs((await lastEvaluation(page)) - evaluation.loss) < 1e-3);

  // What was drawn live, with its cuts, is what a fresh page draws from the store.
  await page.mouse.move(0, 0);
  const [live, words] = [await settled(page), await page.locator("[role=img]").first().getAttribute("aria-label")];
  await page.reload();
  await until("the curve again", async () => (await lastStep(page)) === STEPS);
  assert.equal(await page.locator("[role=img]").first().getAttribute("aria-label"), words);
  assert.equal(await settled(page), live, "the live curve and the stored one are not the same");
  const tiles = await page.locator("dl.tiles").innerText();
  assert.match(tiles, /mean of the last tenth, from/); // the loss that the command line and the lists say, too
  assert.match(tiles, /Tokens per second\s+[\d.,]+\s+mean/);

  // The run has two adapters: the last one, which is named like the job, and the one of its best evaluation.
  const adapter = page.getByRole("listitem").filter({ has: page.getByText(job, { exact: true }) });
  const file = path.join(OUT, "adapter.zip");
  const [download] = await Promise.all([
    page.waitForEvent("download"),
    adapter.getByRole("link", { name: "Download" }).click(),
  ]);
  await download.saveAs(file);
  await adapter.getByRole("button", { name: "Activate" }).click();
  await page.getByRole("status").getByText("is active").waitFor(); // the next view asks for what the daemon has now
  await view(page, "adapters");
  await page.getByText("Active:").getByText(NAME).waitFor();

  assert.equal(await page.getByRole("button", { name: "Use it" }).count(), 0, "two words for one thing");

  // Without being told, Try is with the adapter in use, in the form that a chat model takes.
  await view(page, "chat");
  assert.match(await page.getByLabel("Adapter", { exact: true }).locator("option:checked").innerText(), /^the active one: /);
  assert.equal(await page.getByLabel("How", { exact: true }).inputValue(), "chat");
  await view(page, `chat?adapter=${job}`);
  await page.getByLabel("Text", { exact: true }).fill("schön:");
  await page.getByRole("button", { name: "Ask both" }).click();
  await page.getByRole("heading", { name: `With ${NAME}` }).waitFor({ timeout: WORKER_MS });
  await view(page, "adapters");
  await page.getByRole("button", { name: "Roll back" }).click();
  await page.getByText("Active: the base model").waitFor();
  return { job, file };
});

async function state(page, wanted) {
  await page.locator(`.state[data-state=${wanted}]`).first().waitFor({ timeout: WORKER_MS });
}

/** The pixels of the loss curve. */
function drawn(page) {
  return page
    .locator("canvas")
    .first()
    .evaluate((canvas) => canvas.toDataURL());
}

/** The pixels once two looks are the same. */
async function settled(page) {
  let before = "";
  return until("a still curve", async () => {
    const now = await drawn(page);
    const still = now === before && now;
    before = now;
    return still;
  });
}

/** A job that runs for ever, before all others. */
async function blocker(page) {
  const name = "rows.jsonl";
  const rows = readFileSync(ROWS);
  const post = async (path, data) => (await page.request.post(`${url}/v1/${path}`, { data })).json();
  const { id } = await post("uploads", { kind: "dataset", name, bytes: rows.length });
  await page.request.put(`${url}/v1/uploads/${id}?offset=0`, {
    data: rows,
    headers: { "Content-Type": "application/octet-stream" },
  });
  const { id: dataset } = await post(`uploads/${id}/finish`, {});
  const config = { train: { steps: 1_000_000 }, data: { max_length_tokens: 32 } };
  const { id: job } = await post("jobs", { model: "tiny:llama", dataset, config, priority: 9, name: "before" });
  await until("the one before", async () => (await at(page, job)).state === "running");
  return job;
}

/** The job as the API has it. */
async function at(page, job) {
  return (await page.request.get(`${url}/v1/jobs/${job}`)).json();
}

/** Let the run go on to a step, or some behind it, and stop its processes there. */
async function runsTo(page, job, step) {
  await until(`step ${step}`, async () => ((await at(page, job)).progress.step ?? 0) >= step, WORKER_MS, 10);
  signal(job, "SIGSTOP");
}

/** Send a signal to every process in the job's folder: the worker, or two where a command stands for it. */
function signal(job, name) {
  for (const pid of readdirSync("/proc").filter((entry) => /^\d+$/.test(entry))) {
    try {
      if (readlinkSync(`/proc/${pid}/cwd`).endsWith(`/jobs/${job}`)) process.kill(Number(pid), name);
    } catch {
      // it has ended
    }
  }
}

/** The process that trains the job; 0 where there is none. */
function workerOf(job) {
  for (const name of readdirSync("/proc").filter((entry) => /^\d+$/.test(entry))) {
    try {
      const command = readFileSync(`/proc/${name}/cmdline`, "utf8").split("\0");
      if (command.includes("ondevice.server.worker") && command.some((part) => part.endsWith(`/jobs/${job}`)))
        return Number(name);
    } catch {
      // it has ended
    }
  }
  return 0;
}
