"""Flower's client app: hands messages to the worker of this device, which holds torch."""

from multiprocessing.connection import Client

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedzmg.deploy.flower import from_records, to_records
from fedzmg.deploy.frames import Frame


def train(message: Message, context: Context) -> Message:
    """Answer a greeting or a round."""
    try:
        frame = from_records(message.content)
        with Client(str(context.node_config["worker"])) as worker:
            frame.send(worker)
            answer = Frame.receive(worker)
    except (OSError, EOFError, ValueError) as error:
        answer = Frame({"error": f"{type(error).__name__} {error}"[:500]})
    return Message(to_records(answer), reply_to=message)


app = ClientApp()
app.train()(train)
