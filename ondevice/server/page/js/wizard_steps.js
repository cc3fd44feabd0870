/** The steps of a new job. Each is `{element, ...}` with functions that say what was chosen. */

import { get } from "./api.js";
import { architecture, setName } from "./data.js";
import { choice, h, labelled, newId } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";
import { limitFields, windowFields, windowOf } from "./panels.js";
import { livePreview } from "./preview.js";
import { readingFields, setPath } from "./reading.js";
import { fieldsOf, methodsOf, sectionOf } from "./settings.js";
import { templateForm } from "./templates.js";
import { uploader } from "./uploader.js";

const MAIN_KEYS = ["learning_rate", "rank", "queries", "target_modules"];
const TRAIN_KEYS = ["steps", "batch_size", "eval_every", "checkpoint_every"];
const TRAIN_MORE = ["seed", "schedule", "warmup_steps", "eval_rows", "backend"];

/** What to train: a model or an exported program, and a starting adapter. */
export function modelStep({ models, artifacts, adapters }, signal) {
  const name = h("input", { type: "text", maxlength: 200, autocomplete: "off", dir: "auto" });
  const group = newId("kind");
  const radio = (value, text) => {
    const input = h("input", { type: "radio", name: group, value, checked: value === "model" });
    return { input, element: h("label", { class: "tick" }, input, ` ${text}`) };
  };
  const [asModel, asArtifact] = [
    radio("model", "A model, in PyTorch or MLX"),
    radio("artifact", "An exported program"),
  ];
  const options = models.map((one) => [one.id, `${one.id} (${architecture(one)})`]);
  const model = choice([...options, ["", "another one, by hub id"]], models[0]?.id ?? "");
  const hub = h("input", {
    type: "text",
    maxlength: 200,
    placeholder: "Qwen/Qwen2.5-0.5B-Instruct",
    autocomplete: "off",
    required: true,
  });
  const artifact = choice(
    artifacts.map((one) => [one.id, `${one.id} (${one.target}, ${one.method})`]),
    artifacts[0]?.id,
    { required: true },
  );
  const adapter = choice(
    [["", "none: a new adapter"], ...adapters.map((one) => [one.id, `${one.name}, rank ${one.rank} (${one.id})`])],
    "",
  );
  const hubField = labelled("Hub id", hub, "Downloaded when the job starts.");
  const modelField = labelled("Model", model);
  const artifactField = labelled(
    "Program",
    artifact,
    artifacts.length ? null : "None in the store; upload one under “Data”.",
  );
  const kind = () => (asArtifact.input.checked ? "artifact" : "model");
  const show = () => {
    modelField.hidden = kind() !== "model";
    hubField.hidden = kind() !== "model" || model.value !== "";
    artifactField.hidden = kind() !== "artifact";
  };
  for (const control of [asModel.input, asArtifact.input, model]) control.addEventListener("change", show, { signal });
  show();
  const element = h(
    "div",
    {},
    h(
      "fieldset",
      {},
      h("legend", {}, "What to train"),
      h("div", { class: "ticks" }, asModel.element, asArtifact.element),
    ),
    h(
      "div",
      { class: "fields" },
      modelField,
      hubField,
      artifactField,
      labelled("Start from adapter", adapter),
      labelled("Job name", name, "Optional."),
    ),
  );
  const id = () => model.value || hub.value;
  return {
    element,
    kind,
    source: () => (kind() === "model" ? { model: id() } : { artifact: artifact.value }),
    values: () => ({
      name: name.value,
      ...(kind() === "model" ? { model: id() } : { artifact: artifact.value }),
      ...(adapter.value ? { adapter: adapter.value } : {}),
    }),
  };
}

/** Which rows, how they are read, and a preview of the trained tokens. */
export function dataStep({ schema, settings, templates }, source, signal) {
  const section = sectionOf(schema, "data");
  const [train, evaluate] = [choice([], "", { required: true }), choice([["", "none"]], "")];
  const fields = fieldsOf(section, ["max_length_tokens", "validation_split", "train_on_prompt"]);
  let sets = [];
  const reading = readingFields(settings, () => preview.later());
  const preview = livePreview(
    () =>
      train.value && [
        setPath(train.value),
        {
          ...source(),
          ...reading.options(),
          max_length_tokens: fields.get("max_length_tokens"),
          train_on_prompt: fields.get("train_on_prompt"),
        },
      ],
    signal,
  );
  const look = h("button", { type: "button" }, "Preview the rows");
  look.addEventListener("click", () => attempt(look, preview.place, preview.show));
  /** Another file has other columns. */
  const another = async () => {
    preview.clear();
    reading.forget();
    const set = sets.find((one) => one.id === train.value);
    if (set) await reading.look(setPath(set.id), set, signal).catch((error) => preview.place.show(error));
    template.offer();
  };
  train.addEventListener("change", another);
  const load = async (chosen) => {
    sets = await get("/v1/datasets", signal);
    const options = sets.map((one) => [one.id, setName(one)]);
    for (const [select, first] of [
      [train, []],
      [evaluate, [["", "none"]]],
    ]) {
      const kept = select.value;
      select.replaceChildren(...[...first, ...options].map(([value, text]) => h("option", { value }, text)));
      if ([...select.options].some((option) => option.value === kept)) select.value = kept;
    }
    if (chosen) train.value = chosen;
    else upload.open = !sets.length;
    await another();
  };
  const rows = {
    settings,
    source,
    inside: true,
    // A refused file must not leave another one selected.
    begun: () => {
      train.selectedIndex = -1;
      another();
    },
  };
  const upload = h(
    "details",
    { class: "inner" },
    h("summary", {}, "Upload rows"),
    uploader("dataset", load, signal, rows),
  );
  const template = templateForm(
    reading.columns,
    async (name) => {
      await templates.load();
      reading.fill();
      reading.task.value = name;
      reading.task.dispatchEvent(new Event("change", { bubbles: true }));
    },
    signal,
  );
  const element = h(
    "div",
    {},
    h(
      "div",
      { class: "fields" },
      labelled("Train on", train),
      labelled("Evaluate on", evaluate, "Rows that are only evaluated."),
    ),
    upload,
    reading.element,
    template.element,
    fields.element,
    h("div", { class: "buttons" }, look),
    preview.element,
  );
  return {
    element,
    load,
    mark: (key) => reading.mark(key) ?? fields.mark(key),
    sets: () => ({ dataset: train.value, ...(evaluate.value ? { eval_dataset: evaluate.value } : {}) }),
    values: () => ({ ...fields.values(), ...reading.options() }),
  };
}

/** Methods in words: the recommended one, and the others folded away. */
function methodChoice(methods, changed) {
  const group = newId("method");
  let touched = false;
  const options = methods.map(({ name, words, trains }) => {
    const input = h("input", { type: "radio", name: group, value: name });
    input.addEventListener("change", () => {
      touched = true;
      changed();
    });
    const about = h("small", {}, `${name}, ${trains === "adapter" ? "makes an adapter" : "makes a whole model"}`);
    return { name, input, element: h("label", { class: "tick method" }, input, h("span", {}, words, " ", about)) };
  });
  const [best, others] = [h("div"), h("div")];
  const folded = h("details", { class: "inner" }, h("summary", {}, "Other methods"), others);
  const recommend = (name) => {
    const one = options.find((option) => option.name === name) ?? options[0];
    best.replaceChildren(one.element);
    others.replaceChildren(...options.filter((option) => option !== one).map((option) => option.element));
    if (!touched) one.input.checked = true;
  };
  recommend(null);
  return {
    element: h(
      "fieldset",
      {},
      h("legend", {}, "Method"),
      h("p", { class: "soft" }, "Recommended for this model:"),
      best,
      folded,
    ),
    value: () => options.find(({ input }) => input.checked).name,
    recommend: (name) => {
      recommend(name);
      changed();
    },
  };
}

/** The method with its settings, and the loop's. */
export function methodStep({ schema, settings }) {
  const methods = methodsOf(schema);
  const [train, model] = [sectionOf(schema, "train"), sectionOf(schema, "model")];
  const picked = methodChoice(settings.methods, () => show());
  const [own, more] = [h("div"), h("div")];
  const precision = fieldsOf(model, ["dtype", "device"]);
  const [loop, loopMore] = [fieldsOf(train, TRAIN_KEYS), fieldsOf(train, TRAIN_MORE)];
  const made = new Map();
  let forArtifact = false;
  const fields = () => {
    const name = picked.value();
    if (!made.has(name)) {
      const section = methods.find(([one]) => one === name)[1];
      const main = MAIN_KEYS.filter((key) => key in section.properties);
      const rest = Object.keys(section.properties).filter((key) => key !== "name" && !main.includes(key));
      made.set(name, { main: fieldsOf(section, main), rest: fieldsOf(section, rest) });
    }
    return made.get(name);
  };
  const show = () => {
    const { main, rest } = fields();
    own.replaceChildren(main.element);
    more.replaceChildren(rest.element, precision.element);
  };
  show();
  const rate = fieldsOf({
    properties: {
      learning_rate: {
        anyOf: [{ type: "number" }, { type: "null" }],
        default: null,
        description: "Empty: the program's default.",
      },
    },
  });
  const chosen = h("div", {}, picked.element, own);
  const fixed = h("div", {}, h("p", {}, "Method, batch and seed are fixed in the program."), rate.element);
  const kind = h("div", {}, chosen);
  const further = h("details", { class: "inner" }, h("summary", {}, "More settings of the method"), more);
  const element = h(
    "div",
    {},
    kind,
    h("h3", {}, "The loop"),
    loop.element,
    further,
    h("details", { class: "inner" }, h("summary", {}, "More settings of the loop"), loopMore.element),
  );
  return {
    element,
    /** Recommend the daemon's default method for a model; one that was chosen here stays. */
    suggest: ({ method }) => picked.recommend(method),
    artifact: (yes) => {
      forArtifact = further.hidden = yes;
      kind.replaceChildren(yes ? fixed : chosen);
      loop.hide("batch_size", yes);
      loopMore.hide("seed", yes);
    },
    mark: (section, key) => {
      const groups =
        section === "train" ? [loop, loopMore] : section === "model" ? [precision] : [fields().main, fields().rest];
      const found = groups.map((group) => group.mark(key)).find(Boolean);
      const folded = found?.closest("details");
      if (folded) folded.open = true;
      return found;
    },
    values: () =>
      forArtifact ? rate.values() : { name: picked.value(), ...fields().main.values(), ...fields().rest.values() },
    train: () => ({ ...loop.values(), ...loopMore.values() }),
    model: () => precision.values(),
  };
}

/** When the job runs, and its limits. */
export function queueStep() {
  const priority = h("input", { type: "number", min: -1000, max: 1000, step: 1, value: 0, required: true });
  const [start, end] = windowFields(null);
  const limits = limitFields();
  const element = h(
    "div",
    {},
    h(
      "details",
      { class: "inner" },
      h("summary", {}, "Priority, nightly window, limits"),
      h(
        "div",
        { class: "fields" },
        labelled("Priority", priority, "Higher runs first."),
        labelled("Runs from", start, "Empty: any time."),
        labelled("until", end),
        limits.elements,
      ),
    ),
  );
  return {
    element,
    values: () => ({
      priority: Number(priority.value),
      window: windowOf(start, end),
      limits: limits.values(),
    }),
  };
}
