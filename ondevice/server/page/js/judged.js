/** Train on the ratings: the offer with its rows and plan, and what a job that did so has changed. */

import { ask, at, get, listModels, post } from "./api.js";
import { announce, choice, h, labelled, setText, table } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";
import { number, percent } from "./format.js";
import { planParts } from "./plan.js";
import { showPreview } from "./preview.js";

const NAME = "thumbs";
const FILE = "thumbs.jsonl";
const EPOCHS = 3;
const BATCH = 4;
const TRAINED = 0.8; // the share that is not kept back
const REPLY_TOKENS = 64;

/**
 * A button that offers to train on all ratings; nothing is made before its last step.
 * @param model the base model to offer first
 */
export function trainOffer({ up, down }, model, signal) {
  const open = h("button", { type: "button", class: "main" }, `Train on ${number(up + down)} thumbs`);
  if (!up || !down) {
    const lacks = up ? "Rate a reply with thumbs down, too: " : "Rate a reply with thumbs up, too: ";
    return h("p", { class: "soft" }, `${lacks}a model learns from the difference.`);
  }
  const [place, body] = [problemPlace(), h("div")];
  open.addEventListener("click", () =>
    attempt(open, place, async () => {
      body.replaceChildren(await offerForm(model, up + down, place, signal));
      open.hidden = true;
      body.querySelector("select").focus();
    }),
  );
  return h("div", {}, h("p", {}, `${number(up)} up, ${number(down)} down. `), open, place.element, body);
}

async function offerForm(chosen, count, place, signal) {
  const models = await listModels(signal);
  const model = choice(
    models.map((one) => [one.id, one.id]),
    models.some((one) => one.id === chosen) ? chosen : models[0]?.id,
  );
  const epochs = h("input", { type: "number", min: 1, max: 1000, step: 1, value: EPOCHS, required: true });
  const [rows, plan] = [h("div", { class: "preview" }), h("div", { class: "plan" })];
  const start = h("button", { class: "main", disabled: true }, "Start the job");
  // A lost response must not make a second job of the same form.
  let key = crypto.randomUUID?.() ?? String(Math.random());
  const request = () => ({
    name: "thumbs",
    model: model.value,
    dataset: NAME,
    eval_dataset: NAME,
    config: { train: { steps: Math.ceil((Number(epochs.value) * TRAINED * count) / BATCH), batch_size: BATCH } },
  });
  let running = new AbortController();
  signal.addEventListener("abort", () => running.abort());
  const show = async () => {
    running.abort();
    running = new AbortController();
    const mine = running.signal;
    start.disabled = true;
    place.clear();
    plan.replaceChildren(h("p", { class: "soft", role: "status" }, "Planning…"));
    try {
      await showPreview(rows, at("/v1/datasets", NAME), { model: model.value }, mine);
      const found = await post("/v1/jobs", { ...request(), dry_run: true }, mine);
      plan.replaceChildren(...planParts(found));
      start.disabled = !found.plan.fits;
      announce(found.plan.fits ? "The plan fits." : "The plan does not fit.");
    } catch (error) {
      if (mine.aborted) return;
      plan.replaceChildren();
      place.show(error);
    }
  };
  const form = h(
    "form",
    {
      class: "inner",
      onchange: () => {
        key = crypto.randomUUID?.() ?? String(Math.random());
        if (form.reportValidity()) show();
      },
      onsubmit: (event) => {
        event.preventDefault();
        attempt(start, place, async () => {
          const job = await ask("POST", "/v1/jobs", request(), signal, { "Idempotency-Key": key });
          location.hash = `#/jobs/${encodeURIComponent(job.id)}`;
        }, "The job is queued");
      },
    },
    h("p", {}, "Every fifth prompt is kept back, to see afterwards whether the model orders it rightly."),
    h(
      "div",
      { class: "fields" },
      labelled("Base model to train", model),
      labelled("Times through the thumbs", epochs),
    ),
    rows,
    plan,
    h("div", { class: "buttons" }, start),
  );
  show();
  return form;
}

/**
 * Before and after, of a job that was evaluated on ratings; empty for another one.
 * @param job that is done, with an adapter
 */
export async function beforeAfterPanel(job, adapter, signal) {
  const judged = job.progress.evaluation;
  if (!job.eval_dataset || !judged?.preferences) return h("div");
  const path = at("/v1/datasets", job.eval_dataset);
  const set = await get(path, signal).catch(() => null); // it may have been deleted
  if (set?.name !== FILE) return h("div");
  const [place, pairs] = [problemPlace(), h("div", { class: "answers" })];
  const button = h("button", { type: "button" }, "Ask both for kept-back prompts");
  button.addEventListener("click", () =>
    attempt(button, place, async () => {
      const { rows } = await get(`${path}/columns`, signal);
      await askBoth(job, adapter, rows, pairs, signal);
      announce("Replies complete");
    }),
  );
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Before and after"),
    h("p", {}, `Measured on ${number(judged.rows)} kept-back thumbs, which the run did not train on.`),
    figures(judged),
    h("div", { class: "buttons" }, button),
    place.element,
    pairs,
  );
}

/** A reward is measured from the model before training, so it is 0 there. */
function figures({ preferences, accuracy, rows }) {
  const [low, high] = wilson(accuracy, rows);
  const right = `${percent(accuracy)} of ${number(rows)} (95% interval ${percent(low)} to ${percent(high)})`;
  const line = (name, key) => (preferences[key] === undefined ? [] : [[name, "0", number(preferences[key])]]);
  return table(
    "Rewards of kept-back replies",
    ["Reward", "Before", "After"],
    [
      ...line("Thumbs up", "rewards_chosen"),
      ...line("Thumbs down", "rewards_rejected"),
      ...line("Difference", "margin"),
      ["Judged rightly", "–", right],
    ],
  );
}

/** Wilson's 95% interval of a share of so many rows. */
function wilson(share, rows) {
  const square = 1.96 ** 2 / rows;
  const centre = (share + square / 2) / (1 + square);
  const half = Math.sqrt((share * (1 - share) + square / 4) * square) / (1 + square);
  return [Math.max(0, centre - half), Math.min(1, centre + half)];
}

async function askBoth(job, adapter, rows, pairs, signal) {
  const where = job.artifact ? { artifact: job.artifact } : { model: job.model };
  const prompts = [...new Set(rows.map((row) => row.prompt))];
  pairs.replaceChildren();
  for (const text of prompts) {
    const prompt = promptOf(text);
    const [before, after] = ["Before", "After"].map((title) => reply(title));
    const shown = typeof prompt === "string" ? prompt : prompt.at(-1).content;
    const rated = rows.filter((row) => row.prompt === text);
    pairs.append(
      h(
        "article",
        { class: "panel exchange" },
        h("blockquote", { dir: "auto" }, shown),
        h("p", { class: "soft", dir: "auto" }, rated.map(said).join(" · ")),
        h("div", { class: "pair" }, before.element, after.element),
      ),
    );
    const asked = { ...where, prompt, max_new_tokens: REPLY_TOKENS };
    const found = await post("/v1/generate", { ...asked, adapter }, signal);
    const first = job.adapter ? await post("/v1/generate", { ...asked, adapter: job.adapter }, signal) : null;
    before.set(first ? first.adapted : found.base);
    after.set(found.adapted);
  }
}

function reply(title) {
  const text = h("p", { class: "answer", dir: "auto", "aria-busy": "true" });
  const set = (content) => {
    text.removeAttribute("aria-busy");
    setText(text, content || "(no reply)");
  };
  return { element: h("div", {}, h("h3", {}, title), text), set };
}

function said({ completion, label }) {
  return `${label === "true" ? "\u{1F44D}" : "\u{1F44E}"} ${completion}`;
}

/** A prompt as the columns of a file have it: a text, or the JSON of a conversation's turns. */
function promptOf(text) {
  try {
    const turns = JSON.parse(text);
    if (Array.isArray(turns) && turns.every((turn) => turn?.role && turn.content)) return turns;
  } catch {
    // a text
  }
  return text;
}
