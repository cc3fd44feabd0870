/** The steps of a new job. Each is `{element, ...}` with functions that say what was chosen. */

import { get } from "./api.js";
import { architecture, setName } from "./data.js";
import { columnsField } from "./columns.js";
import { choice, h, labelled, newId } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";
import { limitFields, windowFields, windowOf } from "./panels.js";
import { showPreview } from "./preview.js";
import { fieldsOf, methodsOf, sectionOf } from "./settings.js";
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
export function dataStep({ schema, tasks }, source, signal) {
  const section = sectionOf(schema, "data");
  const [train, evaluate] = [choice([], "", { required: true }), choice([["", "none"]], "")];
  const task = choice([["", "inferred from the keys"], ...tasks.map((one) => [one, one])], "");
  const columns = columnsField();
  const fields = fieldsOf(section, ["max_length_tokens", "validation_split", "train_on_prompt"]);
  const [place, shown] = [problemPlace(), h("div", { class: "preview" })];
  const look = h("button", { type: "button" }, "Preview the rows");
  look.addEventListener("click", () =>
    attempt(look, place, () =>
      showPreview(
        shown,
        train.value,
        {
          ...source(),
          task: task.value,
          column: columns.pairs(),
          max_length_tokens: fields.get("max_length_tokens"),
          train_on_prompt: fields.get("train_on_prompt"),
        },
        signal,
      ),
    ),
  );
  const load = async (chosen) => {
    const found = await get("/v1/datasets", signal);
    const options = found.map((one) => [one.id, setName(one)]);
    for (const [select, first] of [
      [train, []],
      [evaluate, [["", "none"]]],
    ]) {
      const kept = select.value;
      select.replaceChildren(...[...first, ...options].map(([value, text]) => h("option", { value }, text)));
      if ([...select.options].some((option) => option.value === kept)) select.value = kept;
    }
    if (chosen) train.value = chosen;
    else upload.open = !found.length;
  };
  const upload = h(
    "details",
    { class: "inner" },
    h("summary", {}, "Upload rows"),
    uploader("dataset", load, signal, tasks, {
      options: () => ({
        ...(task.value ? { task: task.value } : {}),
        ...(columns.pairs().length ? { columns: columns.value() } : {}),
      }),
      // A refused file must not leave another one selected.
      begun: () => {
        train.selectedIndex = -1;
      },
    }),
  );
  const element = h(
    "div",
    {},
    h(
      "div",
      { class: "fields" },
      labelled("Train on", train),
      labelled("Evaluate on", evaluate, "Rows that are only evaluated."),
      labelled("Prompt template", task),
      columns.element,
    ),
    upload,
    fields.element,
    h("div", { class: "buttons" }, look),
    place.element,
    shown,
  );
  return {
    element,
    load,
    mark: (key) => (key === "task" ? task : key === "columns" ? columns.control : fields.mark(key)),
    sets: () => ({ dataset: train.value, ...(evaluate.value ? { eval_dataset: evaluate.value } : {}) }),
    values: () => ({
      ...fields.values(),
      ...(task.value ? { task: task.value } : {}),
      ...(columns.pairs().length ? { columns: columns.value() } : {}),
    }),
  };
}

/** The method with its settings, and the loop's. */
export function methodStep({ schema }) {
  const methods = methodsOf(schema);
  const [train, model] = [sectionOf(schema, "train"), sectionOf(schema, "model")];
  const select = choice(
    methods.map(([name]) => [name, name]),
    schema.properties.method.default.name,
  );
  let touched = false;
  const [about, own, more] = [h("p", { class: "soft" }), h("div"), h("div")];
  const precision = fieldsOf(model, ["dtype", "device"]);
  const [loop, loopMore] = [fieldsOf(train, TRAIN_KEYS), fieldsOf(train, TRAIN_MORE)];
  const made = new Map();
  let forArtifact = false;
  const fields = () => {
    if (!made.has(select.value)) {
      const section = methods.find(([name]) => name === select.value)[1];
      const main = MAIN_KEYS.filter((key) => key in section.properties);
      const rest = Object.keys(section.properties).filter((key) => key !== "name" && !main.includes(key));
      made.set(select.value, { section, main: fieldsOf(section, main), rest: fieldsOf(section, rest) });
    }
    return made.get(select.value);
  };
  const show = () => {
    const { section, main, rest } = fields();
    about.textContent = section.description ?? "";
    own.replaceChildren(main.element);
    more.replaceChildren(rest.element, precision.element);
  };
  select.addEventListener("change", () => {
    touched = true;
    show();
  });
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
  const chosen = h("div", {}, labelled("Method", select), about, own);
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
    /** Select the daemon's default method for a model, unless another was chosen here. */
    suggest: ({ method, said }) => {
      if (touched || !methods.some(([name]) => name === method)) return;
      select.value = method;
      show();
      about.textContent = said;
    },
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
      forArtifact ? rate.values() : { name: select.value, ...fields().main.values(), ...fields().rest.values() },
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
