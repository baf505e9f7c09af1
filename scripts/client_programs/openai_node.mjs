// openai for Node: models, chat, stream with usage, responses, an unknown model.
import assert from 'node:assert';
import { readFileSync } from 'node:fs';
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: 'none', maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: 'user', content: 'Hello' }];
const plain = await client.chat.completions.create({ model, messages, max_tokens: 8 });
assert.equal(plain.usage.completion_tokens, 8);
let usage = null;
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 8, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) usage = chunk.usage ?? usage;
assert.equal(usage.completion_tokens, 8);
assert((await client.responses.create({ model, input: 'Hello', max_output_tokens: 8 })).output_text);
await assert.rejects(
  client.chat.completions.create({ model: 'nope', messages }),
  (error) => error.status === 404 && error.code === 'model_not_found',
);
const { version } = JSON.parse(readFileSync('node_modules/openai/package.json'));
console.log([version, 'models, chat, stream with usage, responses, 404'].join('|'));
