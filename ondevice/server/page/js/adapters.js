/** Adapters: download, use, roll back, upload, delete. */

import { ask, at, get, keyed, post } from "./api.js";
import { converter } from "./convert.js";
import { announce, h, listing, sure } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";
import { bytes, moment, number } from "./format.js";
import { uploader } from "./uploader.js";

/** The view `#/adapters`. */
export async function adaptersView(main, { signal }) {
  const [place, list, inUse] = [problemPlace(), h("div"), h("p", { class: "in-use", dir: "auto" })];
  const exit = converter(signal);
  const back = h("button", { type: "button" }, "Roll back");
  const load = async () => {
    const adapters = await get("/v1/adapters", signal);
    const active = adapters.find((one) => one.active);
    inUse.replaceChildren(
      ...(active
        ? ["Active: ", h("strong", {}, active.name), " (", h("code", {}, active.id), ")"]
        : ["Active: the base model, without an adapter."]),
    );
    back.hidden = !active;
    await exit.update(adapters);
    const focused = document.activeElement?.dataset?.key;
    list.replaceChildren(
      adapters.length
        ? adaptersTable(adapters, place, load)
        : h("p", {}, "No adapters yet. A finished job makes one."),
    );
    if (focused) (list.querySelector(`[data-key="${CSS.escape(focused)}"]`) ?? back).focus();
  };
  back.addEventListener("click", () =>
    attempt(back, place, async () => {
      const { active } = await post("/v1/adapters/rollback");
      announce(active ? `Rolled back to ${active}` : "Rolled back to the base model");
      await load();
    }),
  );
  await load();
  main.append(
    h("h1", {}, "Adapters"),
    place.element,
    h("div", { class: "title panel" }, inUse, back),
    list,
    exit.element,
    h("details", { class: "panel" }, h("summary", {}, "Upload an adapter"), uploader("adapter", load, signal)),
  );
}

function adaptersTable(adapters, place, changed) {
  const button = (one, text, work, done) => {
    const element = h(
      "button",
      { type: "button", "data-key": `${text} ${one.id}` },
      text,
      h("span", { class: "unseen" }, ` ${one.name}`),
    );
    element.addEventListener("click", () =>
      attempt(
        element,
        place,
        async () => {
          if ((await work()) !== false) await changed();
        },
        done,
      ),
    );
    return element;
  };
  const buttons = (one) =>
    h(
      "div",
      { class: "buttons" },
      h(
        "a",
        { class: "button", href: keyed(at("/v1/adapters", one.id, "/download")), download: `${one.id}.zip` },
        "Download",
        h("span", { class: "unseen" }, ` ${one.name}`),
      ),
      one.active
        ? null
        : button(one, "Activate", () => post(at("/v1/adapters", one.id, "/activate")), `${one.name} is active`),
      h(
        "a",
        { class: "button", href: `#/chat?adapter=${encodeURIComponent(one.id)}` },
        "Try",
        h("span", { class: "unseen" }, ` ${one.name}`),
      ),
      one.active
        ? null
        : button(
            one,
            "Delete",
            async () => {
              if (!(await sure(`Delete the adapter ${one.name}?`, "Delete"))) return false;
              return ask("DELETE", at("/v1/adapters", one.id));
            },
            "Done",
          ),
    );
  const name = (one) => [
    h("span", {}, one.name || one.id),
    one.active ? [" ", h("span", { class: "state", "data-state": "running" }, "active")] : null,
    h("small", {}, one.id),
  ];
  const made = (one) =>
    one.job
      ? h("a", { href: `#/jobs/${encodeURIComponent(one.job)}` }, moment(one.created_s))
      : `${moment(one.created_s)}, uploaded`;
  return listing(
    "All adapters, the newest first",
    ["Name", "Base model", "Rank", "Size", "Created", "Actions"],
    adapters.map((one) => [name(one), one.base_model, number(one.rank), bytes(one.bytes), made(one), buttons(one)]),
  );
}
