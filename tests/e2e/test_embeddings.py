"""Embeddings and tokens of a server: the official client, cancellation, and the metrics after it."""

from __future__ import annotations

import base64
import json
import socket

import numpy as np
import openai
import pytest

from serving import Server

TEXTS = ["Hello there", "Something else altogether", "Hello there"]


def test_vectors_have_length_one(client: openai.OpenAI) -> None:
    as_base64 = client.embeddings.create(model="tiny", input=TEXTS)  # decoded by the client
    as_numbers = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    vectors = np.array([entry.embedding for entry in as_numbers.data])
    assert [entry.index for entry in as_numbers.data] == [0, 1, 2]
    assert vectors.shape == (3, 64)
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6
    assert np.array_equal(vectors, np.array([entry.embedding for entry in as_base64.data]))
    assert np.array_equal(vectors[0], vectors[2])
    assert not np.array_equal(vectors[0], vectors[1])
    assert as_numbers.usage == as_base64.usage
    assert as_numbers.usage.prompt_tokens == as_numbers.usage.total_tokens > 0


def test_token_ids_give_the_vector_of_their_text(tiny: Server, client: openai.OpenAI) -> None:
    ids = tiny.http.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    (by_ids,) = client.embeddings.create(model="tiny", input=ids).data
    (by_text,) = client.embeddings.create(model="tiny", input=TEXTS[0]).data
    (by_list,) = client.embeddings.create(model="tiny", input=[ids]).data
    assert by_ids.embedding == by_text.embedding == by_list.embedding


def test_a_too_long_input_is_a_400_with_both_numbers(tiny: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input=[1] * 65537)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    assert "65537" in str(caught.value)
    assert "65536" in str(caught.value)
    tiny.until("vllm:num_requests_running", 0)


def test_other_dimensions_are_rejected_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input="Hi", dimensions=32)
    assert (caught.value.code, caught.value.param) == ("unsupported_value", "dimensions")


def test_a_client_that_disconnects_frees_its_cells(tiny: Server, client: openai.OpenAI) -> None:
    n_before = tiny.metric("vllm:request_success_total", finished_reason="abort")
    body = json.dumps({"input": [[5] * 60000, [6] * 60000]}).encode()
    port = int(tiny.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        tiny.until("vllm:num_requests_running", 1)
    tiny.until("vllm:request_success_total", n_before + 1, finished_reason="abort")
    tiny.wait_idle()
    assert client.embeddings.create(model="tiny", input="Hi").data


def test_prompt_tokens_are_counted(tiny: Server, client: openai.OpenAI) -> None:
    n_before = tiny.metric("vllm:prompt_tokens_total")
    usage = client.embeddings.create(model="tiny", input=TEXTS).usage
    assert tiny.metric("vllm:prompt_tokens_total") == n_before + usage.prompt_tokens


def test_detokenize_inverts_tokenize(tiny: Server) -> None:
    for text in ("Hello there", " two  spaces\n", "日本語 🦀"):
        body = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
        made = tiny.http.post("/tokenize", json=body).json()
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) > 0
        assert made["max_model_len"] == tiny.http.get("/v1/models/tiny").json()["max_model_len"] == 65536
        assert tiny.http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": text}


def test_tokenize_counts_the_tokens_of_a_chat(tiny: Server, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    made = tiny.http.post("/tokenize", json={"messages": messages}).json()
    response = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)  # type: ignore[arg-type]
    assert response.usage is not None
    assert made["count"] == response.usage.prompt_tokens


def test_version_and_the_card_of_one_model(tiny: Server) -> None:
    assert tiny.http.get("/version").json()["version"]
    card = tiny.http.get("/v1/models/tiny").json()
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 65536)
    assert tiny.http.get("/v1/models/other").status_code == 404


def test_base64_vectors_equal_the_plain_ones(tiny: Server) -> None:
    body = {"input": "Hi", "encoding_format": "base64"}
    (entry,) = tiny.http.post("/v1/embeddings", json=body).json()["data"]
    raw = base64.b64decode(entry["embedding"], validate=True)
    (plain,) = tiny.http.post("/v1/embeddings", json={"input": "Hi"}).json()["data"]
    assert np.frombuffer(raw, "<f4").tolist() == plain["embedding"]
