// Asks the search of a built site what a stranger may ask (questions.json), and says where it does not lead.
//
//     node scripts/ask_site.mjs build/site [question ...]
//
// The site's own worker answers, as in a browser. A question is answered where its section is among the first pages.
import fs from "node:fs";
import path from "node:path";
import { fileURLToPath } from "node:url";
import vm from "node:vm";

const FIRST = 3; // pages that are seen without scrolling
const [site, ...asked] = process.argv.slice(2);
const here = path.dirname(fileURLToPath(import.meta.url));
const questions = JSON.parse(fs.readFileSync(path.join(here, "questions.json"), "utf8"));

/** A function that sends a message to the worker of the site's search and returns its answer. */
function worker() {
  const folder = path.join(site, "assets/javascripts/workers");
  const name = fs.readdirSync(folder).find((file) => file.startsWith("search.") && file.endsWith(".min.js"));
  let answered;
  const self = { console, postMessage: (message) => answered(message), importScripts: () => {} };
  let listener;
  Object.assign(self, { self, addEventListener: (_, given) => (listener = given) });
  vm.runInContext(fs.readFileSync(path.join(folder, name), "utf8"), vm.createContext(self));
  return (type, data) =>
    new Promise((resolve) => {
      answered = resolve;
      listener({ data: { type, data } });
    });
}

const [SETUP, QUERY] = [0, 2]; // types of messages
const ask = worker();
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
await ask(SETUP, { ...index, options: {} });
let lost = 0;
for (const question of asked.length ? asked : Object.keys(questions)) {
  const { items } = (await ask(QUERY, question)).data;
  const pages = items.slice(0, FIRST).map((page) => page.map((section) => section.location));
  const wanted = questions[question]?.replace(".md", ".html");
  const found = wanted === undefined || pages.flat().includes(wanted);
  lost += !found;
  console.log(`${found ? "  " : "no"} ${question}: ${pages.map((sections) => sections[0]).join(", ")}`);
  if (!found) console.log(`   ${wanted} is not among the first ${FIRST} pages`);
}
process.exit(lost ? 1 : 0);
