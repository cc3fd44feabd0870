/** Fleets that this machine is a device of: rounds, bytes, hashes. */

import { every, get } from "./api.js";
import { h, table } from "./dom.js";
import { bytes } from "./format.js";

/** The view `#/fleets`. */
export async function fleetsView(main, { signal }) {
  const list = h("div");
  const load = async () => {
    const fleets = await get("/v1/fleets", signal);
    list.replaceChildren(
      fleets.length ? fleetsTable(fleets) : h("p", {}, "This machine takes part in no fleets. Its owner can add one."),
    );
  };
  await load();
  main.append(h("h1", {}, "Fleets"), list);
  every(5, load, signal);
}

function fleetsTable(fleets) {
  const heads = ["Name", "State", "Server", "Window", "Rounds", "Bytes", "Hash"];
  return table(
    "Fleets",
    heads,
    fleets.map((one) => [
      one.name,
      one.why || "takes part",
      one.server ?? "",
      one.window ? `${one.window.start}–${one.window.end}` : "always",
      one.rounds,
      bytes(one.bytes),
      one.hash ? h("code", { title: one.hash }, one.hash.slice(0, 16)) : "no charter yet",
    ]),
  );
}
