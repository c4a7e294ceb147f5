// Every word on the page: {key: [English, Chinese]}.
import { page } from "./page.js";
import { story } from "./story.js";
import { machine } from "./machine.js";

export const words = { ...page, ...story, ...machine };
