/** Use what a job trained: paste texts or drop a file, see the answers, download them as a table. */

import { at, fetched, get, post } from "./api.js";
import { announce, choice, h, labelled, setText, table } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";
import { number } from "./format.js";
import { title } from "./settings.js";

const AT_ONCE = 50;
const SHOWN = 100;
const DIGITS = 6;
const FILES = ".csv,.tsv,.xlsx,.jsonl,.ndjson,.json,.txt";
const KINDS = [
  ["csv", "CSV"],
  ["xlsx", "Excel"],
  ["jsonl", "JSON lines"],
];

/** A panel for an adapter; empty if nothing records what it was trained to do. */
export async function usePanel(adapter, signal) {
  const task = await get(at("/v1/adapters", adapter, "/task"), signal).catch((error) => {
    if (error.status === 409) return null;
    throw error;
  });
  if (!task || task.format === "thumbs") return h("div"); // a conversation is tried under “Try”
  const single = Object.keys(task.inputs).length === 1;
  const text = h("textarea", { rows: 4, dir: "auto" });
  const [place, said, found] = [problemPlace(), h("p", { role: "status", class: "soft" }), h("div")];
  const bar = h("progress", { hidden: true, "aria-label": "Rows" });
  const button = h("button", { class: "main" }, "Answer");
  const stop = h("button", { type: "button", hidden: true }, "Stop");
  const dropped = dropArea(task, place, signal, () => {
    text.value = "";
  });
  let running = null;
  stop.addEventListener("click", () => running?.abort());
  signal.addEventListener("abort", () => running?.abort());

  const ask = async () => {
    const rows = (await dropped.rows()) ?? rowsOf(text.value, task, single);
    if (!rows.length) throw problem("There is no row", "one row a line", "Paste a text or choose a file.");
    const answers = [];
    found.replaceChildren();
    running = new AbortController();
    stop.hidden = bar.hidden = false;
    bar.max = rows.length;
    try {
      while (answers.length < rows.length) {
        bar.value = answers.length;
        setText(said, `${number(answers.length)} of ${number(rows.length)} rows`);
        const part = rows.slice(answers.length, answers.length + AT_ONCE);
        const asked = { model: adapter, rows: part.map((row) => row.asked) };
        answers.push(...(await post("/v1/predict", asked, running.signal)).data);
      }
    } catch (error) {
      if (error.name !== "AbortError" || signal.aborted || !answers.length) throw error;
    } finally {
      stop.hidden = bar.hidden = true;
    }
    const failed = answers.filter((answer) => answer.prediction === null).length;
    const parts = [`${number(answers.length - failed)} rows answered`];
    if (failed) parts.push(`${number(failed)} without an answer`);
    if (answers.length < rows.length) parts.push(`${number(rows.length - answers.length)} not asked`);
    setText(said, `${parts.join(", ")}.`);
    announce(said.textContent);
    found.replaceChildren(...shown(rows.slice(0, answers.length), answers, dropped.name(), place, signal));
  };
  const send = (event) => {
    event.preventDefault();
    attempt(button, place, ask).then(() => {
      if (place.element.children.length) setText(said, "");
    });
  };
  text.addEventListener("input", dropped.forget);
  const example = `{${Object.values(task.inputs)
    .map((name) => `"${name}": "…"`)
    .join(", ")}}`;
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Use it"),
    h(
      "form",
      { onsubmit: send },
      labelled("Texts", text, single ? "One text a line." : `One row a line: ${example}`),
      dropped.element,
      h("div", { class: "buttons" }, button, stop),
    ),
    bar,
    said,
    place.element,
    found,
  );
}

/** A place for a file, with a drop-down for each column that the training had. */
function dropArea(task, place, signal, taken) {
  const file = h("input", { type: "file", accept: FILES });
  const area = h("div", { class: "drop" }, labelled("or drop a file here", file, "CSV, Excel, JSON lines or text."));
  const [about, columns] = [h("p", { class: "soft", hidden: true, dir: "auto" }), h("div", { class: "fields" })];
  let content = null;
  let reading = null; // the daemon's reply about the file that was chosen last
  let selects = [];
  const clear = () => {
    content = null;
    reading = null;
    selects = [];
    about.hidden = true;
    columns.replaceChildren();
  };
  const read = async (chosen) => {
    clear();
    place.clear();
    const asked = post(`/v1/tables/read?name=${encodeURIComponent(chosen.name.toLowerCase())}`, chosen, signal);
    reading = asked;
    try {
      const found = await asked;
      if (reading !== asked) return; // another file or a text has replaced it
      content = { ...found, name: chosen.name };
      taken();
      setText(about, `${chosen.name}: ${number(found.rows.length)} rows`);
      about.hidden = false;
      if (!found.columns.length) return; // lines of a text
      selects = Object.entries(task.inputs).map(([field, column]) => {
        const near = found.columns.find((name) => name.toLowerCase() === column.toLowerCase());
        const select = choice([["", "choose a column"], ...found.columns.map((name) => [name, name])], near ?? "", {
          required: true,
        });
        return { field, column, select };
      });
      // Nothing is asked if the file has the training's names.
      const foreign = selects.filter(({ column, select }) => select.value !== column);
      columns.replaceChildren(
        ...foreign.map(({ column, select }) => labelled(`${title(column)} is in column`, select)),
      );
    } catch (error) {
      if (reading !== asked) return;
      clear();
      place.show(error);
    }
  };
  file.addEventListener("change", () => file.files[0] && read(file.files[0]));
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
    area.addEventListener(kind, (event) => {
      event.preventDefault();
      area.classList.toggle("over", kind === "dragenter" || kind === "dragover");
      const [chosen] = kind === "drop" ? event.dataTransfer.files : [];
      if (chosen) {
        file.files = event.dataTransfer.files;
        read(chosen);
      }
    });
  }
  return {
    element: h("div", {}, area, about, columns),
    forget: () => {
      clear();
      file.value = "";
    },
    name: () => content?.name ?? null,
    /** The file's rows as soon as it is read, each as it is asked and as it is shown; null without a file. */
    rows: async () => {
      await reading;
      return content?.rows.map((row) => {
        if (typeof row === "string") return { asked: row, fields: { row } };
        const named = selects.map(({ column, select }) => [column, row[select.value]]);
        return { asked: { ...row, ...Object.fromEntries(named) }, fields: row };
      });
    },
  };
}

/** One row a line: an object, or a text where that is all a row has. */
function rowsOf(content, task, single) {
  const lines = content.split(/\r?\n/).filter((line) => line.trim());
  return lines.map((line, index) => {
    try {
      const value = JSON.parse(line);
      if (value !== null && typeof value === "object" && !Array.isArray(value)) return { asked: value, fields: value };
    } catch {
      // a text
    }
    if (single) return { asked: line, fields: { [Object.values(task.inputs)[0]]: line } };
    throw problem(`Line ${index + 1} is not a row`, "a JSON object on each line", null);
  });
}

function problem(message, expected, hint) {
  return { name: "Error", status: 0, message, expected, hint, problems: [] };
}

/** The answers as a table, and as files that `ondevice predict` would have written. */
function shown(rows, answers, like, place, signal) {
  const labels = [...new Set(answers.flatMap((answer) => Object.keys(answer.probabilities)))];
  const [chosen, failed] = [labels.length > 0, answers.some((answer) => answer.reason !== null)];
  const rounded = (value) => (typeof value === "number" ? Number(value.toFixed(DIGITS)) : null);
  const records = answers.map((answer, index) => ({
    ...rows[index].fields,
    prediction: answer.prediction,
    ...(chosen ? { probability: rounded(answer.probability) } : {}),
    ...Object.fromEntries(labels.map((label) => [`probability:${label}`, rounded(answer.probabilities[label])])),
    ...(failed ? { reason: answer.reason } : {}),
  }));
  const columns = [...new Set(records.flatMap(Object.keys))];
  const buttons = KINDS.map(([kind, words]) => {
    const save = h("button", { type: "button" }, `Download as ${words}`);
    save.addEventListener("click", () =>
      attempt(save, place, async () => {
        const file = await fetched(
          "/v1/tables/write",
          { name: `answers.${kind}`, columns, rows: records, like },
          signal,
        );
        download(kind === "csv" ? new Blob(["\ufeff", file]) : file, `answers.${kind}`); // Excel reads UTF-8 by its mark
      }),
    );
    return save;
  });
  const few = answers.slice(0, SHOWN);
  const caption = few.length < answers.length ? `Answers, the first ${SHOWN}` : "Answers";
  const line = (answer, index) => [
    Object.values(rows[index].fields)
      .map((value) => (typeof value === "string" ? value : JSON.stringify(value)))
      .join(" · "),
    answer.prediction === null ? answer.reason : String(answer.prediction),
    number(answer.probability, 3),
  ];
  return [table(caption, ["Row", "Answer", "Probability"], few.map(line)), h("div", { class: "buttons" }, buttons)];
}

function download(blob, name) {
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
