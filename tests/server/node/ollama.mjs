// The released Ollama client for Node: chat, streaming, tools, listing, errors, cancellation.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2] });
const say = (content) => [{ role: "user", content }];
const tools = [{ type: "function", function: { name: "add", parameters: { type: "object" } } }];

const whole = await client.chat({ model: "scripted", messages: say("hello") });
assert.equal(whole.message.content, "Hello there.");
const first = await client.chat({ model: "scripted", messages: say("call"), tools });
assert.deepEqual(first.message.tool_calls[0].function.arguments, { a: 1 });
const second = await client.chat({
  model: "scripted", tools,
  messages: [...say("call"), first.message, { role: "tool", tool_name: "add", content: "5" }],
});
assert.equal(second.message.content, "It is 5.");
assert.equal((await client.list()).models[0].name, "scripted:latest");
assert.ok((await client.show({ model: "scripted" })).capabilities.includes("tools"));
await assert.rejects(
  client.chat({ model: "scripted", messages: say("x"), options: { temperature: -1 } }),
  /temperature/);

const endless = await client.chat({ model: "scripted", messages: say("endless"), stream: true });
try {
  for await (const part of endless) { if (part.message.content) endless.abort(); }
} catch (error) { assert.equal(error.name, "AbortError"); }
console.log("ok");
