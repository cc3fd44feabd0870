/** Use what a job trained: paste texts or choose a file, see the answers, download them as CSV. */

import { at, get, post } from "./api.js";
import { announce, h, labelled, setText, table } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";
import { number } from "./format.js";

const AT_ONCE = 50;
const SHOWN = 100;

/** A panel for an adapter; empty if nothing records what it was trained to do. */
export async function usePanel(adapter, signal) {
  const task = await get(at("/v1/adapters", adapter, "/task"), signal).catch((error) => {
    if (error.status === 409) return null;
    throw error;
  });
  if (!task) return h("div");
  const columns = Object.values(task.inputs);
  const single = columns.length === 1;
  const example = `{${columns.map((name) => `"${name}": "…"`).join(", ")}}`;
  const text = h("textarea", { rows: 4, dir: "auto" });
  const file = h("input", { type: "file", accept: single ? ".txt,.jsonl" : ".jsonl" });
  file.addEventListener("change", async () => {
    if (file.files[0]) text.value = await file.files[0].text();
  });
  const [place, said, found] = [problemPlace(), h("p", { role: "status", class: "soft" }), h("div")];
  const button = h("button", { class: "main" }, "Answer");
  const ask = async () => {
    const rows = rowsOf(text.value, single);
    if (!rows.length) throw problem("There is no row", "one row a line", "Paste a text or choose a file.");
    const answers = [];
    found.replaceChildren();
    while (answers.length < rows.length) {
      setText(said, `${number(answers.length)} of ${number(rows.length)} rows`);
      const part = rows.slice(answers.length, answers.length + AT_ONCE);
      answers.push(...(await post("/v1/predict", { model: adapter, rows: part }, signal)).data);
    }
    const failed = answers.filter((answer) => answer.prediction === null).length;
    const left = failed ? `, ${number(failed)} without an answer` : "";
    setText(said, `${number(rows.length - failed)} rows answered${left}.`);
    announce(said.textContent);
    found.replaceChildren(...shown(rows, answers));
  };
  const send = (event) => {
    event.preventDefault();
    attempt(button, place, ask).then(() => {
      if (place.element.children.length) setText(said, "");
    });
  };
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Use it"),
    h(
      "form",
      { onsubmit: send },
      labelled("Rows", text, single ? "One text a line." : `One row a line: ${example}`),
      labelled("or from a file", file, single ? "Text, or JSON lines." : "JSON lines."),
      h("div", { class: "buttons" }, button),
    ),
    said,
    place.element,
    found,
  );
}

/** One row a line: an object, or a text where that is all a row has. */
function rowsOf(content, single) {
  const lines = content.split(/\r?\n/).filter((line) => line.trim());
  return lines.map((line, index) => {
    try {
      const value = JSON.parse(line);
      if (value !== null && typeof value === "object" && !Array.isArray(value)) return value;
    } catch {
      // a text
    }
    if (single) return line;
    throw problem(`Line ${index + 1} is not a row`, "a JSON object on each line", null);
  });
}

function problem(message, expected, hint) {
  return { name: "Error", status: 0, message, expected, hint, problems: [] };
}

const rowText = (row) => (typeof row === "string" ? row : JSON.stringify(row));

function shown(rows, answers) {
  const line = (answer) => [
    rowText(rows[answer.at]),
    answer.prediction === null ? answer.reason : String(answer.prediction),
    answer.probability === null ? "" : number(answer.probability, 3),
  ];
  const numbered = answers.map((answer, index) => ({ ...answer, at: index }));
  const labels = [...new Set(answers.flatMap((answer) => Object.keys(answer.probabilities)))];
  const lines = [
    ["row", "prediction", "probability", "reason", ...labels.map((label) => `probability of ${label}`)],
    ...numbered.map((answer) => [
      rowText(rows[answer.at]),
      answer.prediction ?? "",
      answer.probability ?? "",
      answer.reason ?? "",
      ...labels.map((label) => answer.probabilities[label] ?? ""),
    ]),
  ];
  const csv = new Blob(["\ufeff", lines.map((cells) => cells.map(quoted).join(",")).join("\r\n"), "\r\n"], {
    type: "text/csv",
  });
  const save = h("button", { type: "button" }, "Download the answers as CSV");
  save.addEventListener("click", () => {
    const address = URL.createObjectURL(csv);
    h("a", { href: address, download: "answers.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  });
  const few = numbered.slice(0, SHOWN);
  const caption = few.length < rows.length ? `Answers, the first ${SHOWN}` : "Answers";
  return [
    table(caption, ["Row", "Answer", "Probability"], few.map(line)),
    h("div", { class: "buttons" }, save),
  ];
}

const quoted = (value) => `"${String(value).replaceAll('"', '""')}"`;
