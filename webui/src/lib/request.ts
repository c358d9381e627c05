// The fields of a chat request that follow from the settings, and the checks of those that are typed as JSON.

import type { Key } from "./i18n";
import type { ChatSettings } from "./types";

/** The fields next to `model` and `messages`. JSON that cannot be read is left out; the settings refuse it. */
export function chatFields({ params, effort, schema, tools }: ChatSettings): Record<string, unknown> {
  const wantedSchema = objectOf(schema);
  const wantedTools = toolsOf(tools);
  return {
    ...params,
    // Templates know one of the two names.
    ...(effort
      ? { chat_template_kwargs: { reasoning_effort: effort, enable_thinking: effort !== "none" } }
      : {}),
    ...(wantedSchema
      ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema: wantedSchema } } }
      : {}),
    ...(wantedTools ? { tools: wantedTools } : {}),
  };
}

/** What is wrong with a schema; null: nothing. */
export function schemaError(text: string): Key | null {
  return objectOf(text) ? null : "schema_wrong";
}

/** What is wrong with a list of tools; null: nothing. */
export function toolsError(text: string): Key | null {
  return toolsOf(text) ? null : "tools_wrong";
}

type Json = Record<string, unknown>;

function isObject(value: unknown): value is Json {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function objectOf(text: string | undefined): Json | null {
  const value = parsed(text);
  return isObject(value) ? value : null;
}

/** Tools as the protocol has them; a function without the object around it gets it. */
function toolsOf(text: string | undefined): Json[] | null {
  const list = parsed(text);
  if (!Array.isArray(list) || list.length === 0) return null;
  const tools = list.map((tool: unknown) =>
    isObject(tool) && !("function" in tool) ? { type: "function", function: tool } : tool,
  );
  const isTool = (tool: unknown): tool is Json =>
    isObject(tool) && isObject(tool.function) && typeof tool.function.name === "string";
  return tools.every(isTool) ? tools : null;
}

function parsed(text: string | undefined): unknown {
  try {
    return text ? JSON.parse(text) : undefined;
  } catch {
    return undefined;
  }
}

/** JSON with indentation; as it came if it cannot be read. */
export function prettyJson(text: string): string {
  const value = parsed(text);
  return value === undefined ? text : JSON.stringify(value, null, 2);
}
