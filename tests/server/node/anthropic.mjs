// The released Anthropic client for Node: each thing that a client has to be able to do, once.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "x", maxRetries: 0 });
const say = (content) => [{ role: "user", content }];
const tools = [{ name: "add", input_schema: { type: "object" } }];
const ask = { model: "m", max_tokens: 99 };

// chat
const whole = await client.messages.create({ ...ask, messages: say("hello") });
assert.equal(whole.content[0].text, "Hello there.");
assert.ok((await client.messages.countTokens({ model: "m", messages: say("x") })).input_tokens > 3);

// streaming
const texts = [];
const streamed = client.messages.stream({ ...ask, messages: say("hello") });
streamed.on("text", (text) => texts.push(text));
await streamed.finalMessage();
assert.equal(texts.join(""), "Hello there.");
assert.ok(texts.length > 1);

// tools, the whole way round, and reasoning
const first = await client.messages.stream({ ...ask, messages: say("call"), tools }).finalMessage();
assert.equal(first.stop_reason, "tool_use");
assert.equal(first.content[0].type, "thinking");
assert.equal(first.content[0].thinking, "hm");
const call = first.content.find((block) => block.type === "tool_use");
assert.deepEqual(call.input, { a: 1 });
const result = { type: "tool_result", tool_use_id: call.id, content: "5" };
const second = await client.messages.create({
  ...ask, tools,
  messages: [...say("call"), { role: "assistant", content: first.content },
    { role: "user", content: [result] }],
});
assert.equal(second.content[0].text, "It is 5.");

// schema
const schema = {
  type: "object", properties: { a: { type: "integer" } }, required: ["a"],
  additionalProperties: false,
};
const form = await client.messages.create({
  ...ask, messages: say("form"), output_config: { format: { type: "json_schema", schema } },
});
assert.deepEqual(JSON.parse(form.content[0].text), { a: 7 });

// errors
await assert.rejects(client.messages.create({ ...ask, messages: say("x"), temperature: -1 }),
  (error) => error.status === 400);
await assert.rejects(client.messages.create({ ...ask, messages: say("busy") }),
  (error) => error.status === 429);

// cancellation
const endless = await client.messages.create(
  { ...ask, messages: say("endless"), stream: true });
for await (const event of endless) { if (event.type === "content_block_delta") break; }
endless.controller.abort();
console.log("ok");
