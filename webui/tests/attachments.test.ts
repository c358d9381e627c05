import { describe, expect, it } from "vitest";
import { attachmentsOf, blockOf, nameOf, sentText } from "../src/lib/attachments";
import { wireMessages } from "../src/lib/context";
import { decoded } from "../src/lib/filetext";
import { DEFAULT_CHAT } from "../src/lib/params";
import { fromJson, newSession, toJson } from "../src/lib/transfer";
import type { Attachment, Message } from "../src/lib/types";

const file: Attachment = { name: "a.py", kind: "text", text: "x = 1", tokens: 7 };
const message: Message = {
  id: "a",
  parent: null,
  role: "user",
  content: "Why?",
  createdMs: 1,
  attachments: [file],
};

describe("attachments", () => {
  it("are sent before the text, in a fence longer than any inside", () => {
    expect(sentText(message)).toBe("a.py\n```py\nx = 1\n```\n\nWhy?");
    expect(blockOf({ name: "b", kind: "paste", text: "a ```` b\n" })).toBe("b\n`````\na ```` b\n`````");
    const [wire] = wireMessages(DEFAULT_CHAT, [{ ...message, content: "" }]);
    expect(wire!.content).toBe("a.py\n```py\nx = 1\n```");
  });

  it("survive an export", () => {
    const [read] = fromJson(toJson([{ session: newSession(1), messages: [message] }]), 1).wholes;
    expect(read!.messages[0]!.attachments).toEqual([file]);
  });

  it("are read from a store that may hold anything", () => {
    const odd = [null, 7, { name: "a" }, { name: "b\u202e\n.txt", text: "t", kind: "x", tokens: "7" }];
    expect(attachmentsOf(odd)).toEqual([{ name: "b .txt", kind: "text", text: "t" }]);
    expect(attachmentsOf("text")).toEqual([]);
    expect(attachmentsOf(Array(50).fill(file))).toHaveLength(10);
    expect(nameOf("\0")).toBe("file");
  });

  it("decode UTF-8 and UTF-16, and nothing else", () => {
    expect(decoded(new TextEncoder().encode("天\r\n"))).toBe("天\n");
    expect(decoded(Uint8Array.of(0xff, 0xfe, 0x29, 0x59))).toBe("天");
    expect(decoded(Uint8Array.of(0xfe, 0xff, 0x59, 0x29))).toBe("天");
    for (const bytes of [[0xff, 0x00], [0x61, 0x00], [0xc3]]) {
      expect(() => decoded(Uint8Array.from(bytes))).toThrowError(
        expect.objectContaining({ key: "file_not_text" }),
      );
    }
  });
});
