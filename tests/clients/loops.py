"""Each client's own loop: a file is written by a tool, the result goes back, an answer comes. Runs in an environment
that has the clients and nothing of Penstock: `python loops.py CLIENT URL`, in a folder of its own."""

# mypy: disable-error-code="import-not-found"
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

URL = sys.argv[2]
ASKED = "Write hello into note.txt."
MODEL = "penstock"
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
    "additionalProperties": False,
}
ABOUT = "Write a text into a file."


def write_file(path: str, content: str) -> str:
    """Write a text into a file.

    Args:
        path: The file's name.
        content: The text.
    """
    Path(path).write_text(content)
    return f"written: {len(content)} letters"


def openai_chat() -> str:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    tool: Any = {
        "type": "function",
        "function": {"name": "write_file", "description": ABOUT, "parameters": PARAMETERS},
    }
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for _ in range(3):
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[tool]) as stream:
            for _event in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = write_file(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def openai_responses() -> str:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    tool: Any = {
        "type": "function",
        "name": "write_file",
        "description": ABOUT,
        "parameters": PARAMETERS,
        "strict": True,
    }
    items: list[Any] = [{"role": "user", "content": ASKED}]
    for _ in range(3):
        with client.responses.stream(model=MODEL, input=items, tools=[tool], store=False) as stream:
            for _event in stream:
                pass
            response = stream.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [item.model_dump(exclude_none=True) for item in response.output]
        for call in calls:
            result = write_file(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    return ""


def anthropic_messages() -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="none")
    tool: Any = {"name": "write_file", "description": ABOUT, "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for _ in range(3):
        with client.messages.stream(model=MODEL, messages=messages, tools=[tool], max_tokens=500) as stream:
            for _event in stream:
                pass
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        if message.stop_reason != "tool_use":
            return "".join(getattr(block, "text", "") for block in message.content)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": write_file(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    return ""


def _openai_agents(kind: str) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    model = getattr(agents, kind)(model=MODEL, openai_client=client)
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(write_file)])

    async def run() -> str:
        result = agents.Runner.run_streamed(agent, ASKED)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    return asyncio.run(run())


def agents_chat() -> str:
    return _openai_agents("OpenAIChatCompletionsModel")


def agents_responses() -> str:
    return _openai_agents("OpenAIResponsesModel")


def _langchain(model: Any) -> str:
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    agent = create_agent(model, [tool(write_file)])
    return str(agent.invoke({"messages": [{"role": "user", "content": ASKED}]})["messages"][-1].text)


def langchain_openai() -> str:
    from langchain_openai import ChatOpenAI

    return _langchain(ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none"))


def langchain_anthropic() -> str:
    from langchain_anthropic import ChatAnthropic

    return _langchain(ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_tokens=500))


def pydantic_ai() -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
    return str(Agent(model, tools=[write_file]).run_sync(ASKED).output)


def instructor() -> str:
    """It has one call only, by the name of the class that it wants."""
    import instructor
    import openai
    from pydantic import BaseModel

    class File(BaseModel):
        path: str
        content: str

    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none"))
    file = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": ASKED}], response_model=File
    )
    write_file(file.path, file.content)
    return "It is written."


def llm_tool() -> str:
    os.environ["LLM_USER_PATH"] = str(Path.cwd() / "llm")
    Path("llm").mkdir()
    models = [
        "- model_id: penstock",
        "  model_name: penstock",
        f"  api_base: {URL}/v1",
        "  supports_tools: true",
    ]
    Path("llm/extra-openai-models.yaml").write_text("\n".join(models))
    source = Path(__file__).read_text()
    function = source[source.index("def write_file") : source.index("def openai_chat")]
    command = [str(Path(sys.executable).parent / "llm"), "prompt", ASKED, "-m", MODEL, "--key", "none"]
    told = f"from pathlib import Path\n{function}"
    done = subprocess.run([*command, "--functions", told], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def smolagents() -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key="none")
    return str(ToolCallingAgent([tool(write_file)], model, verbosity_level=0).run(ASKED))


CLIENTS = (
    openai_chat,
    openai_responses,
    anthropic_messages,
    agents_chat,
    agents_responses,
    langchain_openai,
    langchain_anthropic,
    pydantic_ai,
    instructor,
    llm_tool,
    smolagents,
)

if __name__ == "__main__":
    answer = next(client for client in CLIENTS if client.__name__ == sys.argv[1])()
    assert Path("note.txt").read_text() == "hello", "the file is not what the tool was told to write"
    assert "written" in answer, answer
