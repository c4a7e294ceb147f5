// node search.js SITE QUESTION...: the page of the first hit of each question, as the site's own search finds it.
const fs = require("fs");
const [site, ...questions] = process.argv.slice(2);
const read = (name) => fs.readFileSync(`${site}/${name}`, "utf8");
Object.assign(globalThis, {
  window: globalThis,
  document: { getElementById: () => null },
  SPHINX_HIGHLIGHT_ENABLED: false,
  _ready: () => {},
  _: (text) => text,
});
const code = `${read("_static/language_data.js")}
  ${read("_static/searchtools.js")}
  Search.setIndex = (index) => { Search._index = index; };
  ${read("searchindex.js")};
  ${JSON.stringify(questions)}.map((question) => {
    window.location = { search: "?" + new URLSearchParams({ q: question }) };
    return Search._performSearch(...Search._parseQuery(question)).at(-1)?.[0] ?? "";
  });`;
console.log(JSON.stringify((0, eval)(code)));
