"""Files that go with a message: dropped, pasted and picked; text, code and PDF; and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

from playwright.sync_api import Locator, expect

from axe import violations
from chatpage import COMPLETIONS, Chat
from serving import Server

CODE = 'print("tides")\n'
# A block of Markdown under the file's name, as `lib/attachments.ts` writes it.
CODE_BLOCK = f"tides.py\n```py\n{CODE}```"


def pdf(*pages: str, encrypt: bool = False) -> bytes:
    """Return a PDF with one line of text on each page. `encrypt`: it asks for a password."""
    objects: list[bytes] = [b"<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode())
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>")
    for i, text in enumerate(pages):
        box = f"/Parent 2 0 R /MediaBox [0 0 300 200] /Contents {5 + 2 * i} 0 R"
        objects.append(f"<< /Type /Page {box} /Resources << /Font << /F1 3 0 R >> >> >>".encode())
        draw = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(draw), draw))
    out = bytearray(b"%PDF-1.4\n")
    offsets = []
    for i, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (i, content)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    locked = ""
    if encrypt:
        zeros = "0" * 64
        locked = f"/Encrypt << /Filter /Standard /V 1 /R 2 /O <{zeros}> /U <{zeros}> /P -1 >> /ID [<00> <00>]"
    out += f"trailer << /Size {len(objects) + 1} /Root 1 0 R {locked} >>\nstartxref\n{start}\n%%EOF".encode()
    return bytes(out)


def transfer(name: str, content: bytes, media_type: str) -> str:
    """Return JavaScript for a DataTransfer with one file."""
    return (
        "(() => { const data = new DataTransfer();"
        f"data.items.add(new File([new Uint8Array({list(content)})], {name!r}, {{ type: {media_type!r} }}));"
        "return data; })()"
    )


def drop(chat: Chat, name: str, content: bytes, media_type: str = "") -> None:
    """Drag a file over the page and drop it in its middle."""
    for kind in ("dragenter", "dragover", "drop"):
        chat.page.evaluate(
            f"document.querySelector('main').dispatchEvent(new DragEvent({kind!r},"
            f"{{ bubbles: true, cancelable: true, dataTransfer: {transfer(name, content, media_type)} }}))"
        )
        if kind == "dragover":
            expect(chat.page.get_by_text("Drop text, code or PDF")).to_be_visible()


def paste(chat: Chat, data: str) -> None:
    chat.message.evaluate(
        "(area, data) => { const event = new ClipboardEvent('paste',"
        f"{{ bubbles: true, cancelable: true, clipboardData: {data} }});"
        " if (area.dispatchEvent(event)) area.setRangeText(data); }",
        "",
    )


def pick(chat: Chat, *files: tuple[str, bytes]) -> None:
    with chat.page.expect_file_chooser() as chooser:
        chat.button("Attach files").click()
    payloads = [{"name": name, "mimeType": "", "buffer": content} for name, content in files]
    chooser.value.set_files(payloads)


def chips(chat: Chat) -> Locator:
    """Return the files in the composer."""
    return chat.page.locator(".composer").get_by_role("listitem")


def sent(chat: Chat, text: str) -> str:
    """Send a message and return the content that the server gets."""
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.message.fill(text)
        chat.button("Send").click()
    content: str = request.value.post_data_json["messages"][-1]["content"]
    return content


def count(server: Server, text: str) -> int:
    body = {"prompt": text, "add_special_tokens": False}
    n: int = server.http.post("/tokenize", json=body).json()["count"]
    return n


def test_a_dropped_file_is_a_chip_with_the_servers_token_count(chat: Chat, tiny: Server) -> None:
    chat.complete_with("yes")
    drop(chat, "tides.py", CODE.encode())
    expect(chips(chat)).to_have_text(f"tides.py {count(tiny, CODE_BLOCK)} tokens")
    expect(chat.page.get_by_text("Drop text, code or PDF")).to_have_count(0)
    assert sent(chat, "Explain.") == f"{CODE_BLOCK}\n\nExplain."
    expect(chips(chat)).to_have_count(0)
    expect(chat.user_texts).to_have_text("Explain.")
    chat.done()
    chat.reload()
    chip = chat.user_messages.get_by_role("button", name="tides.py")
    expect(chip).to_contain_text("tokens")
    chip.click()
    expect(chat.page.get_by_role("dialog", name="tides.py")).to_contain_text('print("tides")')
    chat.page.keyboard.press("Escape")
    # The next request and an edited message have the file, too.
    assert sent(chat, "More.") == "More."
    chat.user_messages.first.hover()
    chat.user_messages.first.get_by_role("button", name="Edit message").click()
    chat.page.get_by_role("textbox", name="Edit message").fill("Shorter.")
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.page.keyboard.press("Control+Enter")
    assert request.value.post_data_json["messages"][0]["content"] == f"{CODE_BLOCK}\n\nShorter."
    assert chat.complaints == []


def test_a_file_without_a_message_is_sent_and_names_the_chat(chat: Chat) -> None:
    chat.complete_with("yes")
    pick(chat, ("notes.md", b"# Tides\n```\nx\n```"), ("b.txt", "天".encode("utf-16")))
    expect(chips(chat)).to_have_count(2)
    chips(chat).last.get_by_role("button", name="Remove").click()
    expect(chips(chat)).to_have_count(1)
    assert sent(chat, "") == "notes.md\n````md\n# Tides\n```\nx\n```\n````"
    expect(chat.sessions).to_have_text(["notes.md"])


def test_a_long_paste_becomes_a_chip_and_a_short_one_stays_text(chat: Chat) -> None:
    chat.complete_with("yes")
    text = (
        "(() => { const data = new DataTransfer();"
        " data.setData('text/plain', 'tide '.repeat(%d)); return data; })()"
    )
    paste(chat, text % 100)
    expect(chips(chat)).to_have_count(0)
    paste(chat, text % 1000)
    expect(chips(chat)).to_contain_text("Pasted text 1")
    expect(chat.message).to_have_value("")
    assert sent(chat, "Sum up.") == f"Pasted text 1\n```\n{'tide ' * 1000}\n```\n\nSum up."


def test_waiting_files_stay_with_their_chat_through_a_reload(chat: Chat) -> None:
    chat.complete_with("yes")
    chat.send("first")
    chat.done()
    pick(chat, ("a.txt", b"of the first"))
    expect(chips(chat)).to_contain_text("tokens")
    chat.button("New chat").first.click()
    expect(chips(chat)).to_have_count(0)
    chat.reload()
    chat.sessions.first.click()
    expect(chips(chat)).to_contain_text("a.txt")


def test_the_text_of_a_pdf_is_attached(chat: Chat) -> None:
    """pdf.js runs in a worker, within the content security policy; no warning of the policy is logged."""
    chat.complete_with("yes")
    requests: list[str] = []
    chat.page.on("request", lambda request: requests.append(request.url))
    drop(chat, "tides.pdf", pdf("The moon pulls", "and the water rises"), "application/pdf")
    expect(chips(chat)).to_contain_text("tides.pdf")
    assert any("pdf.worker" in url for url in requests)
    content = sent(chat, "Sum up.")
    assert content == "tides.pdf\n```\nThe moon pulls\n\nand the water rises\n```\n\nSum up."
    assert chat.complaints == []


def test_pdf_is_not_loaded_before_the_first_one(chat: Chat) -> None:
    names = "performance.getEntriesByType('resource').map(({ name }) => name).join()"
    assert "pdf" not in chat.page.evaluate(names)


REFUSED = (
    ("moon.png", b"\x89PNG\r\n", "moon.png is an image, and tiny takes text only."),
    ("a.zip", b"PK\x03\x04\0\0", "a.zip cannot be attached: text, code and PDF files are supported."),
    ("e.txt", b" \n", "e.txt is empty."),
    ("cut.pdf", pdf("x")[:200], "cut.pdf is not a PDF that can be read."),
    ("bad.pdf", b"%PDF-1.7\n" + bytes(range(256)) * 40, "bad.pdf is not a PDF that can be read."),
    ("locked.pdf", pdf("x", encrypt=True), "locked.pdf needs a password."),
    ("blank.pdf", pdf(" "), "blank.pdf has no text"),
    ("long.pdf", pdf(*["x"] * 501), "long.pdf has 501 pages, at most 500 are supported."),
    ("large.txt", b"x" * (2**22 + 1), "large.txt is too large: at most 4 MiB."),
    ("long.txt", b"x" * 1_000_001, "long.txt is too long"),
)


def test_a_file_that_cannot_be_read_is_refused_by_name(chat: Chat) -> None:
    for name, content, message in REFUSED:
        pick(chat, (name, content))
        expect(chat.page.get_by_role("status").get_by_text(message)).to_be_visible()
    expect(chips(chat)).to_have_count(0)
    expect(chat.button("Attach files")).to_be_enabled()
    assert [text for text in chat.complaints if "Content Security" in text or "Trusted" in text] == []


def test_at_most_ten_files_go_with_a_message(chat: Chat) -> None:
    files: Sequence[tuple[str, bytes]] = [(f"{i}.txt", b"x") for i in range(11)]
    pick(chat, *files)
    expect(chat.page.get_by_text("10.txt is not attached: a message has at most 10 files.")).to_be_visible()
    expect(chips(chat)).to_have_count(10)
    assert violations(chat.page) == []
