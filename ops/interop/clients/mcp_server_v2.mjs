// The server of mcp_server_v1.mjs with version 2 of the SDK, which has no sessions.

import { createServer } from "node:http";
import { toNodeHandler } from "@modelcontextprotocol/node";
import { createMcpHandler, McpServer } from "@modelcontextprotocol/server";
import { z } from "zod";

function makeServer() {
  const server = new McpServer({ name: "calc", version: "1" });
  server.registerTool(
    "multiply",
    { description: "Multiply two numbers.", inputSchema: z.object({ a: z.number(), b: z.number() }) },
    async ({ a, b }) => {
      console.log(`multiply ${a} ${b}`);
      return { content: [{ type: "text", text: String(a * b) }] };
    },
  );
  return server;
}

const http = createServer(toNodeHandler(createMcpHandler(makeServer)));
http.listen(0, "127.0.0.1", () => console.log(`http://127.0.0.1:${http.address().port}/mcp`));
