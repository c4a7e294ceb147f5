// Writes the page's app.js. Its first line names the sources it was made of, so that a test can tell a stale one.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { build, context } from "esbuild";

const sources = readdirSync("src", { recursive: true }).map(String).filter((name) => name.endsWith(".js")).sort();
const hash = createHash("sha256");
for (const name of sources) hash.update(readFileSync(`src/${name}`));

const options = {
  entryPoints: ["src/main.js"], outfile: "../src/tilewise_lab/explore/static/app.js", bundle: true, minify: true, format: "iife", target: "es2022",
  charset: "utf8", legalComments: "none", banner: { js: `// site/src ${hash.digest("hex")}` },
};
if (process.argv.includes("--watch")) await (await context({ ...options, sourcemap: "inline" })).watch();
else await build(options);
