// Calls every endpoint of the official client. Arguments: base URL, key. Prints one JSON object per call:
// {"call", ...result}. tests/e2e/test_openai_node.py checks the results.
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Hello there" }];
const options = { model: "tiny", temperature: 0, max_tokens: 12 };
const say = (call, seen) => console.log(JSON.stringify({ call, ...seen }));

async function refused(call, ask) {
  try {
    await ask();
    say(call, { error: null });
  } catch (error) {
    say(call, {
      error: error.constructor.name,
      status: error.status,
      code: error.code,
      param: error.param,
      type: error.type,
    });
  }
}

const listed = [];
for await (const model of client.models.list()) listed.push(model.id);
say("models.list", { ids: listed });
say("models.retrieve", { id: (await client.models.retrieve("tiny")).id });

const chat = await client.chat.completions.create({ ...options, messages });
say("chat", { content: chat.choices[0].message.content, usage: chat.usage });

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...options,
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
say("chat stream", { content: streamed, usage });

const helper = client.chat.completions.stream({ ...options, messages });
say("chat stream helper", { content: (await helper.finalChatCompletion()).choices[0].message.content });

const completion = await client.completions.create({ ...options, prompt: [[5, 6], [5, 6, 7]] });
say("completions", { texts: completion.choices.map((choice) => choice.text) });
const texts = ["", ""];
for await (const chunk of await client.completions.create({
  ...options,
  prompt: [[5, 6], [5, 6, 7]],
  stream: true,
})) {
  for (const choice of chunk.choices) texts[choice.index] += choice.text;
}
say("completions stream", { texts });

const tools = [
  {
    type: "function",
    function: {
      name: "set_light",
      parameters: {
        type: "object",
        properties: { on: { type: "boolean" } },
        required: ["on"],
        additionalProperties: false,
      },
    },
  },
];
const called = await client.chat.completions.create({
  ...options,
  max_tokens: 64,
  messages,
  tools,
  tool_choice: { type: "function", function: { name: "set_light" } },
});
say("tools", {
  finish_reason: called.choices[0].finish_reason,
  calls: called.choices[0].message.tool_calls?.map((call) => call.function),
});

const schema = {
  type: "object",
  properties: { light: { enum: ["on", "off"] } },
  required: ["light"],
  additionalProperties: false,
};
const structured = await client.chat.completions.create({
  ...options,
  max_tokens: 64,
  messages,
  response_format: { type: "json_schema", json_schema: { name: "light", schema } },
});
say("structured", { content: structured.choices[0].message.content });

for (const encoding_format of [undefined, "float"]) {
  const { data } = await client.embeddings.create({
    model: "tiny",
    input: ["Hello there", "Something else"],
    encoding_format,
  });
  say(`embeddings ${encoding_format ?? "default"}`, { vectors: data.map((entry) => entry.embedding) });
}

const endless = { model: "tiny", prompt: "Hello", max_tokens: 60000, stream: true, ignore_eos: true };
const aborted = await client.completions.create(endless);
for await (const chunk of aborted) {
  say("abort", { object: chunk.object });
  break; // leaving the loop aborts the request
}
const controller = new AbortController();
const waiting = client.completions.create({ ...endless, stream: false }, { signal: controller.signal });
setTimeout(() => controller.abort(), 300);
await refused("abort by signal", () => waiting);

await refused("bad request", () => client.chat.completions.create({ ...options, messages, temperature: 3 }));
await refused("unknown model", () => client.models.retrieve("gpt-7"));
const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
await refused("wrong key", () => stranger.models.list());
