/** Upload a file of rows, or a zip of a model, an artifact or an adapter. */

import { ask, at, get, upload } from "./api.js";
import { h, labelled, setText, ticked } from "./dom.js";
import { attempt, problemPlace, rowProblems } from "./errors.js";
import { bytes } from "./format.js";
import { livePreview } from "./preview.js";
import { formatWords, readingFields } from "./reading.js";

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
    help: "the folder of the exported program",
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
 * @param rows for rows: `{settings, source, inside, begun}`: GET /v1/settings with the store's templates, a function to
 * the model that shows them, whether the form stands in another one (forms cannot be nested), and what is told when a
 * file is sent
 */
export function uploader(kind, done, signal, rows = null) {
  const inside = rows?.inside ?? false;
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
  const skip = kind === "dataset" ? ticked("Skip unusable rows") : null;
  const bar = h("progress", { hidden: true, "aria-label": "Upload" });
  const said = h("p", { role: "status", class: "soft" });
  const [place, bad] = [problemPlace(), h("div")];
  const columns = rows && columnsPanel(rows, signal);
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
      ...(skip?.box.checked ? { skip_bad_rows: true } : {}),
    };
    const placed = await upload(
      chosen,
      fields,
      (sent) => {
        bar.value = sent;
        setText(
          said,
          sent < chosen.size ? `${bytes(sent)} of ${bytes(chosen.size)}` : "Upload complete; checking the file.",
        );
      },
      signal,
      columns?.ask,
    );
    if (kind === "dataset") {
      const found = await get(at("/v1/datasets", placed.id), signal);
      setText(said, `${found.rows.toLocaleString()} rows: ${formatWords(found.format)}.`);
      bad.replaceChildren(...(found.problems.length ? [rowProblems(found.problems, "Rows that were left out")] : []));
    } else setText(said, "Uploaded.");
    await done(placed.id);
  };
  const begin = async (event) => {
    event.preventDefault();
    if (!file.reportValidity()) return;
    bad.replaceChildren();
    setText(said, "");
    rows?.begun?.();
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
    ),
    skip?.element,
    h("div", { class: "buttons" }, button),
    bar,
    said,
    columns?.element,
    place.element,
    bad,
  );
}

/**
 * Asks which column holds what, if a file's own names do not say it; the rows are shown as the model would see them.
 * `ask(path)` gives what the user chose, or undefined where the names suffice.
 */
function columnsPanel({ settings, source }, signal) {
  let path = null;
  const reading = readingFields(settings, () => preview.later());
  const preview = livePreview(() => path && [path, { ...source(), ...reading.options() }], signal);
  const use = h("button", { type: "button", class: "main" }, "Use these columns");
  const drop = h("button", { type: "button" }, "Cancel the upload");
  const element = h(
    "section",
    { class: "inner-panel", hidden: true },
    h("h3", { tabindex: "-1" }, "Which column holds what?"),
    reading.element,
    preview.element,
    h("div", { class: "buttons" }, use, drop),
  );
  const answered = () =>
    new Promise((resolve, reject) => {
      use.onclick = () => reading.valid() && resolve(reading.options());
      drop.onclick = () => reject(new DOMException("cancelled", "AbortError"));
      signal.addEventListener("abort", drop.onclick, { once: true });
    });
  const close = () => {
    path = null;
    element.hidden = true;
    preview.clear();
  };
  return {
    element,
    ask: async (base) => {
      try {
        await reading.look(base, {}, signal);
        if (reading.suffices()) return undefined;
        path = base;
        element.hidden = false;
        element.firstChild.focus();
        preview.later();
        return await answered();
      } catch (error) {
        await ask("DELETE", base).catch(() => {});
        throw error;
      } finally {
        close();
      }
    },
  };
}
