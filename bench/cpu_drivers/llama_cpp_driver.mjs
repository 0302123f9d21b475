// llama.cpp by node-llama-cpp's prebuilt binary, which picks the kernels of this machine's processor:
// LIBRARY MODEL SLOTS TOKENS-OF-A-SEQUENCE THREADS.
// The protocol is that of driver.py. Sequences that wait are batched by the library, one token of each or a prompt's chunk.
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [library, modelPath] = process.argv.slice(2, 4);
const [slots, sequenceTokens, threads] = process.argv.slice(4).map(Number);
const {getLlama} = await import(pathToFileURL(`${library}/dist/index.js`));

const llama = await getLlama({gpu: false, maxThreads: threads, build: "never", progressLogs: false});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({
    sequences: slots, contextSize: sequenceTokens, batchSize: 2048, threads, flashAttention: true,
});
const free = Array.from({length: slots}, () => context.getSequence());

async function answer(job, sequence, began) {
    const tokens = [];
    let first = 0;
    await sequence.clearHistory();
    for await (const token of sequence.evaluate(job.prompt, {temperature: 0, yieldEogToken: true})) {
        first ||= performance.now() - began;
        tokens.push(token);
        if (tokens.length === job.output) break;
    }
    return {tokens, first: first / 1000, last: (performance.now() - began) / 1000};
}

async function run(jobs) {
    const began = performance.now();
    const replies = new Array(jobs.length);
    let next = 0;
    const worker = async (sequence) => {
        while (next < jobs.length) {
            const i = next++;
            replies[i] = await answer(jobs[i], sequence, began);
        }
    };
    await Promise.all(free.map(worker));
    return replies;
}

console.log(JSON.stringify({ready: `llama.cpp ${llama.llamaCppRelease?.release ?? "?"} (node-llama-cpp)`}));
for await (const line of createInterface({input: process.stdin}))
    console.log(JSON.stringify(await run(JSON.parse(line))));
process.exit(0);
