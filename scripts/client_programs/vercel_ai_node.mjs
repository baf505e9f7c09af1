// Vercel's AI SDK (ai, @ai-sdk/openai-compatible): generateText, streamText.
import assert from 'node:assert';
import { readFileSync } from 'node:fs';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText } from 'ai';

const provider = createOpenAICompatible({ name: 'gateway', baseURL: `${process.argv[2]}/v1` });
const model = provider(process.argv[3]);
const answer = await generateText({ model, prompt: 'Hello', maxOutputTokens: 8 });
assert.equal(answer.usage.outputTokens, 8);
let parts = 0;
for await (const _ of streamText({ model, prompt: 'Hello', maxOutputTokens: 8 }).textStream) parts += 1;
assert(parts > 0);
const { version } = JSON.parse(readFileSync('node_modules/ai/package.json'));
console.log([version, 'generateText, streamText'].join('|'));
