/** Data sets with previews, models and artifacts; and their uploads. */

import { ask, at, get, listModels } from "./api.js";
import { choice, h, labelled, sure, listing, ticked } from "./dom.js";
import { attempt, problemPlace, rowProblems } from "./errors.js";
import { bytes, moment, number } from "./format.js";
import { livePreview } from "./preview.js";
import { formatWords, readingFields, setPath } from "./reading.js";
import { ownTemplates, templateForm, templateList } from "./templates.js";
import { uploader } from "./uploader.js";

/** The view `#/data`. */
export async function dataView(main, { signal }) {
  const [sets, models, artifacts] = [h("div"), h("div"), h("div")];
  const [settings, templates] = [await get("/v1/settings", signal), await ownTemplates(signal)];
  settings.own = templates.all;
  const place = problemPlace();
  const own = h("div");
  const loadTemplates = async () => {
    await templates.load();
    own.replaceChildren(templateList(templates.all(), place, loadTemplates));
    look.refill();
  };
  let look = null;
  const loadSets = async () => {
    const found = await get("/v1/datasets", signal);
    sets.replaceChildren(
      found.length ? setsTable(found, place, loadSets, (id) => look.choose(id)) : h("p", {}, "No data sets yet."),
    );
    look.fill(found);
  };
  const loadPrograms = async () => {
    const [known, programs] = [await listModels(signal), await get("/v1/artifacts", signal)];
    models.replaceChildren(
      listing(
        "Models on this machine",
        ["Name", "Architecture", "Size", "Actions"],
        known.map((model) => [
          model.id,
          architecture(model),
          model.bytes ? bytes(model.bytes) : "made on demand",
          model.kind === "folder"
            ? remover("/v1/models", model.id, `the model ${model.id}`, place, loadPrograms)
            : null,
        ]),
      ),
    );
    artifacts.replaceChildren(
      programs.length
        ? listing(
            "Exported programs",
            ["Name", "Target", "Method", "Model", "Size", "Actions"],
            programs.map((one) => [
              one.id,
              one.target,
              one.method,
              one.model,
              bytes(one.bytes),
              remover("/v1/artifacts", one.id, `the program ${one.id}`, place, loadPrograms),
            ]),
          )
        : h("p", {}, "No exported programs in the store."),
    );
  };
  look = previewPanel(await listModels(signal), settings, signal);
  await Promise.all([loadSets(), loadPrograms(), loadTemplates()]);
  main.append(
    h("h1", {}, "Data and models"),
    place.element,
    h(
      "section",
      {},
      h("h2", {}, "Data sets"),
      sets,
      h(
        "details",
        { class: "panel" },
        h("summary", {}, "Upload rows"),
        uploader("dataset", loadSets, signal, { settings, source: look.source }),
      ),
      look.element,
    ),
    h(
      "section",
      {},
      h("h2", {}, "Prompt templates"),
      own,
      h("div", { class: "panel" }, templateForm(look.columns, loadTemplates, signal).element),
    ),
    h(
      "section",
      {},
      h("h2", {}, "Models"),
      models,
      h("details", { class: "panel" }, h("summary", {}, "Upload a model"), uploader("model", loadPrograms, signal)),
    ),
    h(
      "section",
      {},
      h("h2", {}, "Artifacts"),
      artifacts,
      h(
        "details",
        { class: "panel" },
        h("summary", {}, "Upload an artifact"),
        uploader("artifact", loadPrograms, signal),
      ),
    ),
  );
}

/** A data set in a list: names may be the same, ids are not. */
export const setName = (one) =>
  `${one.name}, ${number(one.rows)} rows (${one.task ? `template ${one.task}` : formatWords(one.format)}), ${one.id}`;

/** A model's sizes on one line. */
export function architecture(model) {
  const sizes = [
    model.num_hidden_layers && `${model.num_hidden_layers} layers`,
    model.hidden_size && `${model.hidden_size} wide`,
  ];
  return [model.model_type, ...sizes, model.kind === "random" && "random weights, for tests"]
    .filter(Boolean)
    .join(", ");
}

/** A button that deletes a thing of the store, after a question. */
function remover(base, id, what, place, changed) {
  const button = h("button", { type: "button" }, "Delete", h("span", { class: "unseen" }, ` ${what}`));
  button.addEventListener("click", async () => {
    if (!(await sure(`Delete ${what}?`, "Delete"))) return;
    await attempt(
      button,
      place,
      async () => {
        await ask("DELETE", at(base, id));
        await changed();
      },
      "Deleted",
    );
  });
  return button;
}

function setsTable(found, place, changed, look) {
  const buttons = (one) => {
    const show = h("button", { type: "button" }, "Preview", h("span", { class: "unseen" }, ` into ${one.name}`));
    show.addEventListener("click", () => look(one.id));
    const remove = remover("/v1/datasets", one.id, `the data set ${one.name}`, place, changed);
    return h("div", { class: "buttons" }, show, remove);
  };
  const left = (one) =>
    one.problems.length
      ? h("details", {}, h("summary", {}, number(one.problems.length)), rowProblems(one.problems, "Left out"))
      : "none";
  return listing(
    "Data sets, the newest first",
    ["Name", "Format", "Rows", "Left out", "Size", "Uploaded", "Actions"],
    found.map((one) => [
      [h("span", {}, one.name), h("small", {}, one.id)],
      one.task ? `${formatWords(one.format)}, template ${one.task}` : formatWords(one.format),
      number(one.rows),
      left(one),
      bytes(one.bytes),
      moment(one.created_s),
      buttons(one),
    ]),
  );
}

function previewPanel(models, settings, signal) {
  let sets = [];
  const dataset = choice([], "", { required: true });
  const model = choice(
    models.map((one) => [one.id, one.id]),
    models[0]?.id,
  );
  const reading = readingFields(settings, () => preview.later());
  const length = h("input", { type: "number", min: 8, max: 65536, placeholder: "chosen for the rows" });
  const prompt = ticked("Train on the prompt too");
  const button = h("button", {}, "Preview");
  const source = () => ({ model: model.value });
  const preview = livePreview(
    () =>
      dataset.value && [
        setPath(dataset.value),
        {
          ...source(),
          ...reading.options(),
          max_length_tokens: length.value,
          train_on_prompt: prompt.box.checked,
        },
      ],
    signal,
  );
  /** Another file has other columns. */
  const another = async () => {
    preview.clear();
    reading.forget();
    const set = sets.find((one) => one.id === dataset.value);
    if (set) await reading.look(setPath(set.id), set, signal).catch((error) => preview.place.show(error));
  };
  dataset.addEventListener("change", another);
  const read = () => attempt(button, preview.place, preview.show);
  const element = h(
    "details",
    { class: "panel" },
    h("summary", {}, "Preview a data set"),
    h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          read();
        },
      },
      h(
        "div",
        { class: "fields" },
        labelled("Data set", dataset),
        labelled("Read by model", model),
        labelled("Most tokens per row", length),
      ),
      reading.element,
      prompt.element,
      h("div", { class: "buttons" }, button),
    ),
    preview.element,
  );
  element.addEventListener("toggle", () => element.open && !reading.columns().length && another());
  return {
    element,
    source,
    columns: reading.columns,
    refill: reading.fill,
    fill: (found) => {
      sets = found;
      const kept = dataset.value;
      dataset.replaceChildren(...found.map((one) => h("option", { value: one.id }, setName(one))));
      if (found.some((one) => one.id === kept)) dataset.value = kept;
      else reading.forget();
    },
    choose: async (id) => {
      dataset.value = id;
      await another();
      element.open = true;
      element.scrollIntoView({ block: "nearest" });
      dataset.focus();
      read();
    },
  };
}
