import { mount } from "svelte";
import App from "./components/App.svelte";
import { Db } from "./lib/db";
import "./styles/base.css";
import "./styles/prose.css";
import { library } from "./state/library.svelte";
import { settings } from "./state/look.svelte";
import { server } from "./state/server.svelte";
import { t, ui } from "./state/ui.svelte";

void server.connect();
const db = await Db.open().catch(() => null);
await settings.load(db);
await library.load(db);
const wanted = /^#\/chat\/([\w-]+)$/.exec(location.hash)?.[1] ?? null;
await library.show(wanted);
mount(App, { target: document.getElementById("app")! });
if (db === null) ui.toast(t("no_store"));
