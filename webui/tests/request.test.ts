import { describe, expect, it } from "vitest";
import { DEFAULT_CHAT } from "../src/lib/params";
import { chatFields, prettyJson, schemaError, toolsError } from "../src/lib/request";

const fields = (settings: object) => chatFields({ ...DEFAULT_CHAT, ...settings });

describe("the fields of a request", () => {
  it("are the parameters, and what is set besides", () => {
    expect(fields({ params: { temperature: 0 } })).toEqual({ temperature: 0 });
    expect(fields({ effort: "none" }).chat_template_kwargs).toEqual({
      reasoning_effort: "none",
      enable_thinking: false,
    });
    expect(fields({ schema: '{"type":"object"}' })).toEqual({
      response_format: { type: "json_schema", json_schema: { name: "answer", schema: { type: "object" } } },
    });
  });

  it("take a tool in both forms", () => {
    const tool = { type: "function", function: { name: "f" } };
    expect(fields({ tools: '[{"name":"f"}]' })).toEqual({ tools: [tool] });
    expect(fields({ tools: JSON.stringify([tool]) })).toEqual({ tools: [tool] });
  });

  it("leave out JSON that cannot be read", () => {
    expect(fields({ schema: "{", tools: "[1" })).toEqual({});
  });

  it.each(["", "{", "[]", "null", "1"])("refuse the schema %j", (text) => {
    expect(schemaError(text)).toBe("schema_wrong");
    expect(schemaError("{}")).toBeNull();
  });

  it.each(["", "{}", "[]", "[1]", "[null]", '[{"parameters":{}}]', '[{"function":{}}]'])(
    "refuse the tools %j",
    (text) => {
      expect(toolsError(text)).toBe("tools_wrong");
      expect(toolsError('[{"name":"f"}]')).toBeNull();
    },
  );

  it("have JSON indented, and other text as it is", () => {
    expect(prettyJson('{"a":1}')).toBe('{\n  "a": 1\n}');
    expect(prettyJson("{a")).toBe("{a");
  });
});
