/** Data sets with previews, models and artifacts; and their uploads. */

import { ask, at, get, listModels } from "./api.js";
import { columnsField } from "./columns.js";
import { choice, h, labelled, sure, listing, ticked } from "./dom.js";
import { attempt, problemPlace, rowProblems } from "./errors.js";
import { bytes, moment, number } from "./format.js";
import { showPreview } from "./preview.js";
import { uploader } from "./uploader.js";

/** The view `#/data`. */
export async function dataView(main, { signal }) {
  const [sets, models, artifacts] = [h("div"), h("div"), h("div")];
  const { tasks } = await get("/v1/settings", signal);
  const place = problemPlace();
  let look = null;
  const loadSets = async () => {
    const found = await get("/v1/datasets", signal);
    sets.replaceChildren(
      found.length
        ? setsTable(found, place, loadSets, (id) => look.choose(id))
        : h("p", {}, "No data sets yet."),
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
  look = previewPanel(await listModels(signal), tasks, signal);
  await Promise.all([loadSets(), loadPrograms()]);
  main.append(
    h("h1", {}, "Data and models"),
    place.element,
    h(
      "section",
      {},
      h("h2", {}, "Data sets"),
      sets,
      h("details", { class: "panel" }, h("summary", {}, "Upload rows"), uploader("dataset", loadSets, signal, tasks)),
      look.element,
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
  `${one.name}, ${number(one.rows)} rows (${one.task ? `task ${one.task}` : one.format}), ${one.id}`;

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
      one.task ? `${one.format}, task ${one.task}` : one.format,
      number(one.rows),
      left(one),
      bytes(one.bytes),
      moment(one.created_s),
      buttons(one),
    ]),
  );
}

function previewPanel(models, tasks, signal) {
  const [place, shown] = [problemPlace(), h("div", { class: "preview" })];
  const dataset = choice([], "", { required: true });
  const model = choice(
    models.map((one) => [one.id, one.id]),
    models[0]?.id,
  );
  const task = choice([["", "inferred from the keys"], ...tasks.map((one) => [one, one])], "");
  const columns = columnsField();
  const length = h("input", { type: "number", min: 8, max: 65536, placeholder: "chosen for the rows" });
  const prompt = ticked("Train on the prompt too");
  const button = h("button", {}, "Preview");
  const read = () =>
    attempt(button, place, () =>
      showPreview(
        shown,
        dataset.value,
        {
          model: model.value,
          task: task.value,
          column: columns.pairs(),
          max_length_tokens: length.value,
          train_on_prompt: prompt.box.checked,
        },
        signal,
      ),
    );
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
        labelled("Prompt template", task),
        columns.element,
        labelled("Most tokens per row", length),
      ),
      prompt.element,
      h("div", { class: "buttons" }, button),
    ),
    place.element,
    shown,
  );
  return {
    element,
    fill: (found) => {
      const kept = dataset.value;
      dataset.replaceChildren(
        ...found.map((one) => h("option", { value: one.id }, setName(one))),
      );
      if (found.some((one) => one.id === kept)) dataset.value = kept;
    },
    choose: (id) => {
      element.open = true;
      dataset.value = id;
      element.scrollIntoView({ block: "nearest" });
      dataset.focus();
      read();
    },
  };
}
