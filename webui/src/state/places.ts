// The places in the chats outlive a reload of this tab.

import type { Place } from "../lib/window";

const KEY = "places";

/** Restores the places, and saves them when the page goes. Without effect where the browser blocks storage. */
export function keepPlaces(places: Map<string, Place>): void {
  let storage: Storage;
  try {
    storage = sessionStorage;
  } catch {
    return;
  }
  for (const [id, place] of JSON.parse(storage.getItem(KEY) ?? "[]") as [string, Place][])
    places.set(id, place);
  addEventListener("pagehide", () => storage.setItem(KEY, JSON.stringify([...places])));
}
