// Vercel's AI SDK over the OpenAI-compatible provider: the way of opencode and many others.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const [url, embeddingUrl] = process.argv.slice(2);
const options = { name: "mlx", supportsStructuredOutputs: true };
const provider = createOpenAICompatible({ ...options, baseURL: url + "/v1" });
const model = provider("m");

// chat
const { text } = await generateText({ model, prompt: "hello" });
assert.equal(text, "Hello there.");

// streaming
const pieces = [];
for await (const piece of streamText({ model, prompt: "hello" }).textStream) pieces.push(piece);
assert.equal(pieces.join(""), "Hello there.");
assert.ok(pieces.length > 1);

// tools, the whole way round, and reasoning
const add = tool({
  inputSchema: jsonSchema({ type: "object", properties: { a: { type: "number" } } }),
  execute: async ({ a }) => String(a + 4),
});
const streamed = streamText({ model, prompt: "call", tools: { add }, stopWhen: stepCountIs(3) });
let answer = "";
for await (const part of streamed.textStream) answer += part;
assert.ok(answer.endsWith("It is 5."));
assert.equal((await streamed.steps).length, 2);
assert.equal((await streamed.steps)[0].reasoningText, "hm");

// schema
const schema = jsonSchema({
  type: "object", properties: { a: { type: "integer" } }, required: ["a"],
  additionalProperties: false,
});
const form = await generateText({ model, prompt: "form", output: Output.object({ schema }) });
assert.deepEqual(form.output, { a: 7 });

// embeddings
const embedder = createOpenAICompatible({ ...options, baseURL: embeddingUrl + "/v1" });
const made = await embedMany({ model: embedder.embeddingModel("m"), values: ["one", "two"] });
assert.equal(made.embeddings.length, 2);
assert.ok(Math.abs(Math.hypot(...made.embeddings[1]) - 1) < 1e-5);

// errors
await assert.rejects(generateText({ model, prompt: "x", temperature: -1, maxRetries: 0 }),
  (error) => error.statusCode === 400);
await assert.rejects(generateText({ model, prompt: "busy", maxRetries: 0 }),
  (error) => error.statusCode === 429);

// cancellation
const controller = new AbortController();
const endless = streamText({ model, prompt: "endless", abortSignal: controller.signal });
for await (const part of endless.textStream) { controller.abort(); break; }
console.log("ok");
