"""The documented path of the queue as a data source."""

from pipeline.queue_data_source import QueueDataSource

__all__ = ["QueueDataSource"]
