# Build from the repository root: docker build -f release/containers/cpu.Dockerfile -t stratagem .
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
# A build argument, so that images can follow the lock of a site: EXTRAS=checkpoint,ray,observe
ARG EXTRAS=checkpoint,ray,observe
RUN useradd --create-home --uid 1000 trainer
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/stratagem-*.whl)[${EXTRAS}]" && rm -r /wheels
USER 1000
WORKDIR /home/trainer
ENV KERAS_BACKEND=jax PYTHONUNBUFFERED=1
RUN stratagem --version
CMD ["stratagem", "devices"]
