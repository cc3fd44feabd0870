/** Convert an adapter for another program: choose, watch, download. */

import { ask, at, get, pause, post } from "./api.js";
import { announce, choice, h, labelled, setText } from "./dom.js";
import { attempt, problemBox, problemPlace } from "./errors.js";
import { bytes, number } from "./format.js";

const LOOK_S = 0.5;

/** The part of the view `#/adapters` that converts; `update(adapters)` sets the choices. */
export function converter(signal) {
  const [adapter, form, dtype] = [choice([]), choice([]), choice([])];
  const dtypeField = labelled("Type of the weights", dtype);
  const button = h("button", { class: "main" }, "Convert");
  const [place, list] = [problemPlace(), h("ul", { class: "plain" })];
  const about = h("p", { class: "soft" });
  let forms = [];
  const follow = () => {
    const chosen = forms.find((one) => one.name === form.value);
    if (!chosen) return;
    dtype.replaceChildren(...chosen.dtypes.map((one) => h("option", { value: one }, one)));
    dtypeField.hidden = !chosen.dtypes.length;
    const what = chosen.merged ? "The model with the adapter merged" : "Only the adapter";
    setText(about, `${what}, for ${chosen.reader}; ${chosen.folder ? "a folder, as a zip" : "one file"}.`);
  };
  form.addEventListener("change", follow);

  const watch = async (conversion) => {
    const [row, bar] = [h("li", { dir: "auto" }), h("progress", { "aria-label": "Converting" })];
    const [title, stage] = [h("strong", {}, `${conversion.adapter}, ${conversion.to}`), h("span")];
    const path = at("/v1/conversions", conversion.id);
    const forget = h("button", { type: "button" }, "Stop");
    forget.addEventListener("click", () =>
      attempt(forget, place, async () => {
        await ask("DELETE", path);
        row.remove();
      }),
    );
    row.append(title, stage, bar, forget);
    list.prepend(row);
    let now = conversion;
    while (["waiting", "running"].includes(now.state)) {
      setText(stage, now.stage || now.state);
      await pause(LOOK_S, signal);
      if (!row.isConnected) return;
      now = await get(path, signal);
    }
    bar.remove();
    setText(forget, "Forget");
    if (now.state === "failed") {
      stage.replaceWith(problemBox(now.error));
      announce("The conversion failed");
      return;
    }
    setText(stage, said(now));
    forget.before(h("a", { class: "button", href: `${path}/download`, download: now.file }, `Download ${now.file}`));
    announce(`${now.file} is ready to download`);
  };
  /** The state of a conversion; a closed view or a deleted row is not an error. */
  const follows = (conversion) =>
    watch(conversion).catch((error) => (error.status === 404 ? undefined : place.show(error)));

  const update = async (adapters) => {
    const kept = adapter.value;
    adapter.replaceChildren(...adapters.map((one) => h("option", { value: one.id }, `${one.name} (${one.id})`)));
    if (adapters.some((one) => one.id === kept)) adapter.value = kept;
    element.hidden = !adapters.length;
    if (forms.length) return;
    forms = await get("/v1/forms", signal);
    form.replaceChildren(...forms.map((one) => h("option", { value: one.name }, `${one.name}: for ${one.reader}`)));
    follow();
    for (const conversion of (await get("/v1/conversions", signal)).reverse()) follows(conversion);
  };
  const element = h(
    "form",
    {
      class: "panel",
      onsubmit: (event) => {
        event.preventDefault();
        attempt(button, place, async () => {
          const wanted = { adapter: adapter.value, to: form.value, dtype: dtype.value || null };
          follows(await post("/v1/conversions", wanted, signal));
        });
      },
    },
    h("h2", {}, "Convert to"),
    h(
      "div",
      { class: "fields" },
      labelled("Adapter", adapter),
      h("div", { class: "field" }, labelled("Form", form), about),
      dtypeField,
    ),
    h("div", { class: "buttons" }, button),
    place.element,
    list,
  );
  return { element, update };
}

/** Size, and the result of the check. */
function said({ bytes: size, report }) {
  const kept =
    report.kept < 1 ? `; rounding left ${number(Math.round(100 * report.kept))}% of the adapter's change` : "";
  return `${bytes(size)}, read back and compared${kept}. ${report.notes.join(" ")}`;
}
