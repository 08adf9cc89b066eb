// The released Ollama client for Node: each thing that a client has to be able to do, once.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const [url, embeddingUrl] = process.argv.slice(2);
const client = new Ollama({ host: url });
const model = "scripted";
const say = (content) => [{ role: "user", content }];
const tools = [{ type: "function", function: { name: "add", parameters: { type: "object" } } }];

// chat
const whole = await client.chat({ model, messages: say("hello") });
assert.equal(whole.message.content, "Hello there.");
assert.equal((await client.generate({ model, prompt: "hello" })).response, "Hello there.");
assert.equal((await client.list()).models[0].name, "scripted:latest");
assert.ok((await client.show({ model })).capabilities.includes("tools"));

// streaming
const pieces = [];
for await (const part of await client.chat({ model, messages: say("hello"), stream: true })) {
  pieces.push(part.message.content);
}
assert.equal(pieces.join(""), "Hello there.");
assert.ok(pieces.filter((piece) => piece).length > 1);

// tools, the whole way round, and reasoning
const first = await client.chat({ model, messages: say("call"), tools, think: true });
assert.deepEqual(first.message.tool_calls[0].function.arguments, { a: 1 });
assert.equal(first.message.thinking, "hm");
const second = await client.chat({
  model, tools,
  messages: [...say("call"), first.message, { role: "tool", tool_name: "add", content: "5" }],
});
assert.equal(second.message.content, "It is 5.");

// schema
const format = {
  type: "object", properties: { a: { type: "integer" } }, required: ["a"],
  additionalProperties: false,
};
const form = await client.chat({ model, messages: say("form"), format });
assert.deepEqual(JSON.parse(form.message.content), { a: 7 });

// embeddings
const embedder = new Ollama({ host: embeddingUrl });
const made = await embedder.embed({ model, input: ["one", "two"] });
assert.equal(made.embeddings.length, 2);
assert.ok(Math.abs(Math.hypot(...made.embeddings[1]) - 1) < 1e-5);

// errors
await assert.rejects(
  client.chat({ model, messages: say("x"), options: { temperature: -1 } }), /temperature/);
await assert.rejects(client.chat({ model, messages: say("busy") }),
  (error) => error.status_code === 429);
await assert.rejects(client.embed({ model, input: "x" }), /embeddings/);

// cancellation
const endless = await client.chat({ model, messages: say("endless"), stream: true });
try {
  for await (const part of endless) { if (part.message.content) endless.abort(); }
} catch (error) { assert.equal(error.name, "AbortError"); }
console.log("ok");
