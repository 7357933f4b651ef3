"""A connection to one OpenAI-compatible server: where it is, who asks, and which model it serves."""

import asyncio
from dataclasses import dataclass
from typing import Self

import httpx

SHOWN = 200  # characters of what a server said in a message
LOCKED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


@dataclass(frozen=True)
class Advice:
    """What a person can do about a server that does not answer as it should, in the settings of their command."""

    start: str = "start the server, or correct url="
    model: str = "model=..."
    key: str = "name the variable that holds its key with api_key_variable="


class Connection:
    """`async with` it; requests may run side by side.

    model: the name under which the server serves; None takes the only one that it lists.
    patience_s: what it gets to answer a question that generates nothing.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None,
        key: str | None,
        connections: int,
        connect_s: float,
        patience_s: float,
        advice: Advice = Advice(),
    ):
        self.url, self.model, self.advice, self._patience_s = server_root(url), model, advice, patience_s
        self.http = httpx.AsyncClient(
            base_url=self.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            # Only connecting is timed here: what comes later has deadlines that follow the tokens.
            timeout=httpx.Timeout(None, connect=connect_s),
            limits=httpx.Limits(max_connections=connections + 1, max_keepalive_connections=connections + 1),
            trust_env=False,  # a proxy of the environment has no place between us and the server
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.http.aclose()

    async def find_model(self) -> str:
        """The name of the served model, from now on part of every request.

        Raises:
            ValueError: if the server does not answer, or lists none or several.
        """
        if self.model is None:
            listing = await self.get("/v1/models")
            try:
                names = [row["id"] for row in listing.json()["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.url}/v1/models lists no models; give {self.advice.model}") from error
            if len(names) != 1:
                raise ValueError(f"{self.url} serves {names}; say which with {self.advice.model}")
            self.model = names[0]
        return self.model

    async def get(self, path: str) -> httpx.Response:
        """What the server shows at `path`.

        Raises:
            ValueError: if it does not answer, or with another status than 200.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                response = await self.http.get(path)
        except (httpx.RequestError, TimeoutError) as error:
            said = str(error) or f"nothing within {self._patience_s} s"
            raise ValueError(f"{self.url}{path} does not answer ({said}); {self.advice.start}") from error
        if response.status_code in LOCKED:
            raise self.locked(response)
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"{self.url}{path} answers {response.status_code}: {response.text[:SHOWN]!r}")
        return response

    def locked(self, response: httpx.Response) -> ValueError:
        """The error for a response that asks for a key, or another one."""
        said = f"{response.status_code}: {response.text[:SHOWN]!r}"
        return ValueError(f"{self.url} wants a key, or another one ({said}); {self.advice.key}")


def server_root(url: str) -> str:
    """`url` without the /v1 that clients of this API are often given.

    Raises:
        ValueError: if it is not an http(s) address.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"url={url} is not an address ({error}); give one like http://127.0.0.1:8000") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url={url} must be like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")
