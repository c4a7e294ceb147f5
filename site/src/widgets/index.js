// The chapters, in the order of the story.
import { softmax } from "./softmax.js";
import { online } from "./online.js";
import { tiles } from "./tiles.js";
import { masks } from "./masks.js";
import { backward } from "./backward.js";
import { layout } from "./layout.js";
import { pipeline } from "./pipeline.js";
import { waves } from "./waves.js";
import { roof } from "./roof.js";
import { cache } from "./cache.js";
import { plans } from "./plans.js";

export const chapters = [softmax, online, tiles, masks, backward, layout, pipeline, waves, roof, cache, plans];
