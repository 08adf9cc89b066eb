// The released OpenAI client for Node: chat, streaming, tools, reasoning, errors, cancellation.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "x", maxRetries: 0 });
const say = (content) => [{ role: "user", content }];
const tools = [{ type: "function", function: { name: "add", parameters: { type: "object" } } }];

const whole = await client.chat.completions.create({ model: "m", messages: say("hello") });
assert.equal(whole.choices[0].message.content, "Hello there.");
assert.ok(whole.usage.total_tokens > 3);

const stream = client.chat.completions.stream({ model: "m", messages: say("call"), tools });
const final = await stream.finalChatCompletion();
assert.equal(final.choices[0].finish_reason, "tool_calls");
const [call] = final.choices[0].message.tool_calls;
assert.deepEqual(JSON.parse(call.function.arguments), { a: 1 });
const second = await client.chat.completions.create({
  model: "m", tools,
  messages: [...say("call"), final.choices[0].message,
    { role: "tool", tool_call_id: call.id, content: "5" }],
});
assert.equal(second.choices[0].message.content, "It is 5.");

const response = await client.responses.create({ model: "m", input: "hello" });
assert.equal(response.output_text, "Hello there.");

await assert.rejects(
  client.chat.completions.create({ model: "m", messages: say("x"), temperature: -1 }),
  (error) => error.status === 400 && error.param === "temperature");
await assert.rejects(client.chat.completions.create({ model: "m", messages: say("busy") }),
  (error) => error.status === 429);
await assert.rejects(client.embeddings.create({ model: "m", input: "x" }),
  (error) => error.status === 400);

const endless = await client.chat.completions.create(
  { model: "m", messages: say("endless"), stream: true });
for await (const chunk of endless) { if (chunk.choices[0].delta.content) break; }
endless.controller.abort();
console.log("ok");
