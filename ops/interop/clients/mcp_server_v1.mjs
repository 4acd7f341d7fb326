// An MCP server of version 1 of the TypeScript SDK with one tool. It prints its URL, and each call that it gets.

import { randomUUID } from "node:crypto";
import { createServer } from "node:http";
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StreamableHTTPServerTransport } from "@modelcontextprotocol/sdk/server/streamableHttp.js";
import { z } from "zod";

const sessions = new Map();

async function open() {
  const transport = new StreamableHTTPServerTransport({
    sessionIdGenerator: randomUUID,
    onsessioninitialized: (id) => sessions.set(id, transport),
  });
  const server = new McpServer({ name: "calc", version: "1" });
  server.registerTool(
    "multiply",
    { description: "Multiply two numbers.", inputSchema: { a: z.number(), b: z.number() } },
    async ({ a, b }) => {
      console.log(`multiply ${a} ${b}`);
      return { content: [{ type: "text", text: String(a * b) }] };
    },
  );
  await server.connect(transport);
  return transport;
}

const http = createServer(async (request, response) => {
  const id = request.headers["mcp-session-id"];
  if (id !== undefined && !sessions.has(id)) {
    response.writeHead(404).end();
    return;
  }
  const transport = id === undefined ? await open() : sessions.get(id);
  await transport.handleRequest(request, response);
});
http.listen(0, "127.0.0.1", () => console.log(`http://127.0.0.1:${http.address().port}/mcp`));
