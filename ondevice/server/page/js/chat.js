/** The base model and the same model with an adapter, asked the same. */

import { get, listModels, post } from "./api.js";
import { choice, h, labelled } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";

/** Before an artifact's id in the list of what can answer; no model's id holds a space. */
const PROGRAM = "program ";

/** The view `#/chat`; `?adapter=ID` chooses one. */
export async function chatView(main, { query, signal }) {
  const [models, artifacts, adapters, jobs] = await Promise.all([
    listModels(signal),
    ...["/v1/artifacts", "/v1/adapters", "/v1/jobs"].map((path) => get(path, signal)),
  ]);
  const programs = artifacts.filter((one) => one.runtime.startsWith("torch "));
  const active = adapters.find((one) => one.active);
  const wanted = query.get("adapter") ?? "";
  const adapter = choice(
    [
      ["", active ? `the active one: ${active.name}` : "none is active: the base model alone"],
      ...adapters.map((one) => [one.id, `${one.name} (${one.id})`]),
    ],
    adapters.some((one) => one.id === wanted) ? wanted : "",
  );
  const model = choice(
    [
      ...models.map((one) => [one.id, one.id]),
      ...programs.map((one) => [PROGRAM + one.id, `${one.id}, the exported program's own weights`]),
    ],
    models[0]?.id,
  );
  const mode = choice(
    [
      ["chat", "Ask, as in a chat"],
      ["text", "Let it go on with a text"],
    ],
    "text",
  );
  const prompt = h("textarea", { rows: 3, required: true, maxlength: 100000, dir: "auto" });
  const system = h("input", { type: "text", maxlength: 10000, dir: "auto" });
  const systemField = labelled("What the model is told first", system, "May be empty.");
  const tokens = h("input", { type: "number", min: 1, max: 1024, value: 64, required: true });
  const heat = h("input", { type: "number", min: 0, max: 10, step: "any", value: 0, required: true });
  const seed = h("input", { type: "number", min: 0, max: 2 ** 31 - 1, value: 0, required: true });
  const button = h("button", { class: "main" }, "Ask both");
  const [place, answers] = [problemPlace(), h("div", { class: "answers", "aria-live": "polite" })];
  const names = new Map(adapters.map((one) => [one.id, one.name]));

  /** An adapter made by a job of this daemon says which model or program it belongs to. */
  const follow = () => {
    const chosen = adapters.find((one) => one.id === (adapter.value || active?.id));
    const job = jobs.find((one) => one.id === chosen?.job);
    const base = job?.artifact ? PROGRAM + job.artifact : (job?.model ?? chosen?.base_model);
    if (base && [...model.options].some((option) => option.value === base)) model.value = base;
  };
  const showSystem = () => {
    systemField.hidden = mode.value !== "chat";
  };
  adapter.addEventListener("change", follow);
  mode.addEventListener("change", showSystem);
  follow();
  showSystem();

  const send = async () => {
    const text = prompt.value;
    const turns = [
      ...(system.value ? [{ role: "system", content: system.value }] : []),
      { role: "user", content: text },
    ];
    const found = await post(
      "/v1/generate",
      {
        ...(model.value.startsWith(PROGRAM) ? { artifact: model.value.slice(PROGRAM.length) } : { model: model.value }),
        adapter: adapter.value || null,
        prompt: mode.value === "chat" ? turns : text,
        max_new_tokens: Number(tokens.value),
        temperature: Number(heat.value),
        seed: Number(seed.value),
      },
      signal,
    );
    answers.prepend(exchange(text, found, names.get(found.adapter)));
    prompt.select();
  };
  main.append(
    h("h1", {}, "Try it: before and after"),
    h("p", {}, "The same question to the base model and to the model with an adapter. Each question is asked afresh."),
    h(
      "form",
      {
        class: "panel",
        onsubmit: (event) => {
          event.preventDefault();
          attempt(button, place, send);
        },
      },
      h(
        "div",
        { class: "fields" },
        labelled("Adapter", adapter),
        labelled("Base model", model),
        labelled("How", mode),
        systemField,
      ),
      labelled("Text", prompt, null, "field wide"),
      h(
        "details",
        { class: "inner" },
        h("summary", {}, "Length, temperature, seed"),
        h(
          "div",
          { class: "fields" },
          labelled("At most so many tokens", tokens),
          labelled("Temperature", heat, "0 takes the most likely token."),
          labelled("Seed", seed),
        ),
      ),
      h("div", { class: "buttons" }, button),
      place.element,
    ),
    answers,
  );
}

function exchange(prompt, { base, adapted, adapter }, name) {
  const answer = (title, text) =>
    h("div", {}, h("h3", { dir: "auto" }, title), h("p", { class: "answer", dir: "auto" }, text || "(nothing)"));
  return h(
    "article",
    { class: "panel exchange" },
    h("h2", { class: "unseen" }, "Answers"),
    h("blockquote", { dir: "auto" }, prompt),
    h(
      "div",
      { class: "pair" },
      answer("Base model", base),
      adapter
        ? answer(`With ${name || adapter}`, adapted)
        : h("p", { class: "soft" }, "No adapter is active; choose one to compare."),
    ),
  );
}
