# Builds the web UI and the wheel from this source tree, then installs the wheel in a slim image.
#   docker build -t llaisys .
#   docker run --rm -p 127.0.0.1:8000:8000 -e LLAISYS_API_KEY=... -v llaisys:/var/cache/llaisys llaisys
FROM node:22-bookworm-slim AS webui
WORKDIR /src
COPY webui/package.json webui/package-lock.json webui/
RUN npm ci --prefix webui
COPY webui webui
RUN npm run --prefix webui build

FROM rust:1.95-slim-bookworm AS wheel
# The distribution's versions are fine: the last stage contains neither package.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir "maturin==1.*"
WORKDIR /src
COPY . .
COPY --from=webui /src/python/llaisys/webui python/llaisys/webui
RUN /venv/bin/maturin build --release --out /wheels

FROM python:3.12-slim-bookworm
COPY --from=wheel /wheels /wheels
COPY requirements.lock /wheels/
RUN pip install --no-cache-dir --constraint /wheels/requirements.lock /wheels/*.whl \
    && rm -rf /wheels \
    && useradd --system --uid 10001 --create-home --home-dir /var/cache/llaisys llaisys
USER 10001
ENV LLAISYS_HOME=/var/cache/llaisys \
    LLAISYS_HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1
VOLUME /var/cache/llaisys
EXPOSE 8000
STOPSIGNAL SIGTERM
# /health is 503 while the model downloads and loads: failures do not count before the first 200.
HEALTHCHECK --interval=10s --timeout=3s --start-period=1h \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
# Without an API key the server refuses to listen on all addresses.
ENTRYPOINT ["llaisys"]
CMD ["serve"]
