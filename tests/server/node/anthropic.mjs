// The released Anthropic client for Node: messages, streaming, tools, errors, cancellation.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "x", maxRetries: 0 });
const say = (content) => [{ role: "user", content }];
const tools = [{ name: "add", input_schema: { type: "object" } }];
const ask = { model: "m", max_tokens: 99 };

const whole = await client.messages.create({ ...ask, messages: say("hello") });
assert.equal(whole.content[0].text, "Hello there.");

const first = await client.messages.stream({ ...ask, messages: say("call"), tools }).finalMessage();
assert.equal(first.stop_reason, "tool_use");
const call = first.content.find((block) => block.type === "tool_use");
assert.deepEqual(call.input, { a: 1 });
const result = { type: "tool_result", tool_use_id: call.id, content: "5" };
const second = await client.messages.create({
  ...ask, tools,
  messages: [...say("call"), { role: "assistant", content: first.content },
    { role: "user", content: [result] }],
});
assert.equal(second.content[0].text, "It is 5.");
assert.ok((await client.messages.countTokens({ model: "m", messages: say("x") })).input_tokens > 3);

await assert.rejects(client.messages.create({ ...ask, messages: say("x"), temperature: -1 }),
  (error) => error.status === 400);
await assert.rejects(client.messages.create({ ...ask, messages: say("busy") }),
  (error) => error.status === 429);

const endless = await client.messages.create(
  { ...ask, messages: say("endless"), stream: true });
for await (const event of endless) { if (event.type === "content_block_delta") break; }
endless.controller.abort();
console.log("ok");
