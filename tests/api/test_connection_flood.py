"""More connections than the process may have descriptors, beside a stream."""

import socket
import subprocess
import sys
from pathlib import Path

FEW_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from runner.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
OPTIONS = ("--slots", "1", "--ctx", "512", "--threads", "1", "--port", "0")
BODY = b'{"prompt":"1, 2, 3,","max_tokens":60,"temperature":0,"ignore_eos":true,"stream":true}'
HEAD = f"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"


def test_connections_that_say_nothing_take_no_stream_down(smollm2_path: Path) -> None:
    command = [sys.executable, "-c", FEW_DESCRIPTORS, "serve", "-m", str(smollm2_path), *OPTIONS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(line.split("listening on ")[1].split()[0] for line in server.stderr if "listening on " in line)
        port = int(url.rpartition(":")[2])
        stream = socket.create_connection(("127.0.0.1", port))
        stream.sendall(HEAD.encode() + BODY)
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        answer = b"".join(iter(lambda: stream.recv(65536), b""))
        for each in (*idle, stream):
            each.close()
        server.terminate()
        server.stderr.close()
    assert server.returncode == 0
    assert answer.endswith(b"data: [DONE]\n\n")
