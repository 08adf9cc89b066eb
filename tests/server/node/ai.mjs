// Vercel's AI SDK over the OpenAI-compatible provider: the way of opencode and many others.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const provider = createOpenAICompatible({ name: "mlx", baseURL: process.argv[2] + "/v1" });
const model = provider("m");

const { text } = await generateText({ model, prompt: "hello" });
assert.equal(text, "Hello there.");

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

await assert.rejects(generateText({ model, prompt: "x", temperature: -1, maxRetries: 0 }),
  (error) => error.statusCode === 400);

const controller = new AbortController();
const endless = streamText({ model, prompt: "endless", abortSignal: controller.signal });
for await (const part of endless.textStream) { controller.abort(); break; }
console.log("ok");
