/** Upload a file of rows, or a zip of a model, an artifact or an adapter. */

import { get, at, upload } from "./api.js";
import { columnsField } from "./columns.js";
import { choice, h, labelled, setText, ticked } from "./dom.js";
import { attempt, problemPlace, rowProblems } from "./errors.js";
import { bytes } from "./format.js";

const WORDS = {
  dataset: {
    file: "File with rows",
    help: "JSON, CSV, Excel, Parquet or text",
    accept: ".jsonl,.ndjson,.json,.csv,.tsv,.xlsx,.parquet,.txt",
    button: "Upload and check",
  },
  model: {
    file: "Zip of the model's folder",
    help: "config.json, tokenizer and .safetensors files",
    accept: ".zip",
    button: "Upload the model",
  },
  artifact: {
    file: "Zip of the artifact's folder",
    help: "the folder that `ondevice export` wrote",
    accept: ".zip",
    button: "Upload the artifact",
  },
  adapter: {
    file: "Zip of the adapter",
    help: "adapter_config.json and adapter_model.safetensors, as PEFT writes them",
    accept: ".zip",
    button: "Upload the adapter",
  },
};

/**
 * A form that uploads one file.
 * @param kind what the file is
 * @param done called with the id of the new thing
 * @param tasks for rows: prompt templates to choose from
 * @param inside stands in another form: then it is a group, as forms cannot be nested, and the form says how rows are
 * read: `{options, begun}`, a function to `{task, columns}` and one that is told when a file is sent
 */
export function uploader(kind, done, signal, tasks = [], inside = null) {
  const words = WORDS[kind];
  const file = h("input", { type: "file", accept: words.accept, required: true });
  const name =
    kind === "dataset"
      ? null
      : h("input", {
          type: "text",
          required: true,
          maxlength: 60,
          pattern: kind === "adapter" ? null : "[a-z0-9][a-z0-9._\\-]*",
          autocomplete: "off",
        });
  const alone = kind === "dataset" && !inside;
  const task = alone ? choice([["", "inferred from the keys"], ...tasks.map((one) => [one, one])], "") : null;
  const columns = alone ? columnsField() : null;
  const skip = kind === "dataset" ? ticked("Skip unusable rows") : null;
  const bar = h("progress", { hidden: true, "aria-label": "Upload" });
  const said = h("p", { role: "status", class: "soft" });
  const [place, bad] = [problemPlace(), h("div")];
  const button = h("button", { type: inside ? "button" : "submit" }, words.button);
  if (name) {
    file.addEventListener("change", () => {
      name.value ||=
        file.files[0]?.name
          .replace(/\.zip$/i, "")
          .toLowerCase()
          .replace(/[^a-z0-9._-]+/g, "-")
          .replace(/^[^a-z0-9]+/, "") ?? "";
    });
  }
  const send = async (chosen) => {
    bar.hidden = false;
    bar.max = chosen.size;
    bar.value = 0;
    const fields = {
      kind,
      ...(name ? { name: name.value } : {}),
      ...(task?.value ? { task: task.value } : {}),
      ...(columns && Object.keys(columns.value()).length ? { columns: columns.value() } : {}),
      ...inside?.options(),
      ...(skip?.box.checked ? { skip_bad_rows: true } : {}),
    };
    const placed = await upload(
      chosen,
      fields,
      (sent) => {
        bar.value = sent;
        setText(
          said,
          sent < chosen.size
            ? `${bytes(sent)} of ${bytes(chosen.size)}`
            : "Upload complete; checking the file.",
        );
      },
      signal,
    );
    if (kind === "dataset") {
      const found = await get(at("/v1/datasets", placed.id), signal);
      setText(said, `${found.rows.toLocaleString()} rows of the format “${found.format}”.`);
      bad.replaceChildren(...(found.problems.length ? [rowProblems(found.problems, "Rows that were left out")] : []));
    } else setText(said, "Uploaded.");
    await done(placed.id);
  };
  const begin = async (event) => {
    event.preventDefault();
    if (!file.reportValidity()) return;
    bad.replaceChildren();
    setText(said, "");
    inside?.begun();
    await attempt(button, place, () => send(file.files[0]));
    bar.hidden = true;
    if (place.element.children.length) setText(said, "");
  };
  if (inside) button.addEventListener("click", begin);
  return h(
    inside ? "div" : "form",
    { class: "upload", onsubmit: begin },
    h(
      "div",
      { class: "fields" },
      labelled(words.file, file, words.help),
      name &&
        labelled(
          kind === "adapter" ? "Title" : "Name",
          name,
          kind === "adapter" ? null : "small letters, digits, dots, dashes",
        ),
      task && labelled("Prompt template", task),
      columns?.element,
    ),
    skip?.element,
    h("div", { class: "buttons" }, button),
    bar,
    said,
    place.element,
    bad,
  );
}
