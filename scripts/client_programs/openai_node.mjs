// openai for Node: models, chat, stream with usage, responses, an unknown model, a batch and its files.
import assert from 'node:assert';
import { readFileSync } from 'node:fs';
import { setTimeout } from 'node:timers/promises';
import OpenAI, { toFile } from 'openai';

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
const lines = [0, 1, 2].map((number) => JSON.stringify({
  custom_id: `q${number}`, method: 'POST', url: '/v1/chat/completions', body: { model, messages, max_tokens: 4 },
}));
const file = await client.files.create({ file: await toFile(Buffer.from(lines.join('\n')), 'in.jsonl'), purpose: 'batch' });
let batch = await client.batches.create({
  input_file_id: file.id, endpoint: '/v1/chat/completions', completion_window: '24h',
});
while (['validating', 'in_progress', 'finalizing'].includes(batch.status)) {
  await setTimeout(100);
  batch = await client.batches.retrieve(batch.id);
}
const answers = (await (await client.files.content(batch.output_file_id)).text()).trim().split('\n').map(JSON.parse);
assert.deepEqual(answers.map((answer) => answer.custom_id).sort(), ['q0', 'q1', 'q2']);
assert((await client.files.delete(file.id)).deleted);
const { version } = JSON.parse(readFileSync('node_modules/openai/package.json'));
console.log([version, 'models, chat, stream with usage, responses, 404, files, a batch'].join('|'));
