# Two images: `--target loader` runs the daemon and has no TensorFlow; `--target trainer` has the client and
# TensorFlow. docker-compose.yml uses both.

FROM python:3.11-slim AS base
# All versions are those of constraints.txt. The second variable is for the build dependencies; older versions of pip
# take these from the first.
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_BUILD_CONSTRAINT=/src/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1
# A new volume mounted at /data takes over the owner of this directory.
RUN useradd --create-home --uid 10001 penstock && install --directory --owner penstock /data
WORKDIR /src
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY proto proto
COPY server server
COPY client client

FROM base AS loader
# `http` is for the web page, metrics and probes over HTTP. Add `demo` for the imports of examples/digits, or what your feeds need.
ARG EXTRAS=server,http
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install ".[${EXTRAS}]"
USER 10001
WORKDIR /feeds
EXPOSE 5555 8090
# The exec form, so that the SIGTERM of `docker stop` reaches the daemon.
CMD ["penstock", "--help"]

FROM base AS trainer
ENV TF_CPP_MIN_LOG_LEVEL=2
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install '.[tensorflow]'
USER 10001
WORKDIR /home/penstock
CMD ["python"]
