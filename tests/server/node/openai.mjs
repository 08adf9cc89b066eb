// The released OpenAI client for Node: each thing that a client has to be able to do, once.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, embeddingUrl] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url + "/v1", apiKey: "x", maxRetries: 0 });
const say = (content) => [{ role: "user", content }];
const tools = [{ type: "function", function: { name: "add", parameters: { type: "object" } } }];

// chat
const whole = await client.chat.completions.create({ model: "m", messages: say("hello") });
assert.equal(whole.choices[0].message.content, "Hello there.");
assert.ok(whole.usage.total_tokens > 3);
const response = await client.responses.create({ model: "m", input: "hello" });
assert.equal(response.output_text, "Hello there.");

// streaming
const pieces = [];
for await (const chunk of await client.chat.completions.create(
  { model: "m", messages: say("hello"), stream: true })) {
  pieces.push(chunk.choices[0].delta.content ?? "");
}
assert.equal(pieces.join(""), "Hello there.");
assert.ok(pieces.filter((piece) => piece).length > 1);

// tools, the whole way round, and reasoning
const stream = client.chat.completions.stream({ model: "m", messages: say("call"), tools });
const final = await stream.finalChatCompletion();
assert.equal(final.choices[0].finish_reason, "tool_calls");
assert.equal(final.choices[0].message.reasoning_content, "hm");
const [call] = final.choices[0].message.tool_calls;
assert.deepEqual(JSON.parse(call.function.arguments), { a: 1 });
const second = await client.chat.completions.create({
  model: "m", tools,
  messages: [...say("call"), final.choices[0].message,
    { role: "tool", tool_call_id: call.id, content: "5" }],
});
assert.equal(second.choices[0].message.content, "It is 5.");

// schema
const schema = {
  type: "object", properties: { a: { type: "integer" } }, required: ["a"],
  additionalProperties: false,
};
const form = await client.chat.completions.parse({
  model: "m", messages: say("form"),
  response_format: { type: "json_schema", json_schema: { name: "x", strict: true, schema } },
});
assert.deepEqual(JSON.parse(form.choices[0].message.content), { a: 7 });

// embeddings
const embedder = new OpenAI({ baseURL: embeddingUrl + "/v1", apiKey: "x", maxRetries: 0 });
const made = await embedder.embeddings.create({ model: "m", input: ["one", "two"] });
assert.equal(made.data.length, 2);
assert.ok(Math.abs(Math.hypot(...made.data[1].embedding) - 1) < 1e-5);

// errors
await assert.rejects(
  client.chat.completions.create({ model: "m", messages: say("x"), temperature: -1 }),
  (error) => error.status === 400 && error.param === "temperature");
await assert.rejects(client.chat.completions.create({ model: "m", messages: say("busy") }),
  (error) => error.status === 429);
await assert.rejects(client.embeddings.create({ model: "m", input: "x" }),
  (error) => error.status === 400);

// cancellation
const endless = await client.chat.completions.create(
  { model: "m", messages: say("endless"), stream: true });
for await (const chunk of endless) { if (chunk.choices[0].delta.content) break; }
endless.controller.abort();
console.log("ok");
